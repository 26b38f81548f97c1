"""How an unchanged model computes with different weights for every instance: proxies, rules and layouts."""
