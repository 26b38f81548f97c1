"""Lets an unchanged model compute with different weights for every instance: proxies, rules and layouts."""
