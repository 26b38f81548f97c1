"""Adds a build of the documentation to the site that has all versions.

    python tools/publish_docs.py docs/_build/html site 0.2.0

The site has one folder per version, and ``stable`` with the newest release. Its first page leads to ``stable``, or to
``dev`` before the first release. ``versions.html`` lists the versions.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

RELEASE = re.compile(r"\d+\.\d+\.\d+")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>deltasam</title>
{head}</head>
<body>
{body}
</body>
</html>
"""


def publish(html: Path, site: Path, version: str) -> None:
    """Copies the pages, and updates ``stable``, ``index.html`` and ``versions.html``.

    Raises:
        ValueError: The version is neither ``dev`` nor a number such as 0.2.0.
    """
    if version != "dev" and RELEASE.fullmatch(version) is None:
        raise ValueError(f"version {version!r}: must be dev, or a number such as 0.2.0")
    _copy(html, site / version)
    versions = releases(site)
    if versions and version == versions[0]:
        _copy(html, site / "stable")
    home = "stable" if versions else "dev"
    redirect = f'<meta http-equiv="refresh" content="0; url={home}/">\n'
    (site / "index.html").write_text(PAGE.format(head=redirect, body=f'<a href="{home}/">deltasam</a>'))
    shown = [*versions, *(["dev"] if (site / "dev").is_dir() else [])]
    links = "\n".join(f'<li><a href="{name}/">{name}</a></li>' for name in shown)
    (site / "versions.html").write_text(PAGE.format(head="", body=f"<h1>Versions</h1>\n<ul>\n{links}\n</ul>"))
    (site / ".nojekyll").touch()  # GitHub Pages would drop the folders _static and _sources


def releases(site: Path) -> list[str]:
    """Returns the released versions on the site, the newest first."""
    names = (path.name for path in site.iterdir() if path.is_dir() and RELEASE.fullmatch(path.name))
    return sorted(names, key=lambda name: tuple(map(int, name.split("."))), reverse=True)


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)  # a page that no longer exists must not stay
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: publish_docs.py HTML SITE VERSION")
    publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
