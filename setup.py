"""The package's description: the README, whose links lead to the published files. All else is in setup.cfg."""

import configparser
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def described() -> str:
    """The README with absolute links, so that it reads the same outside of the repository."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    version = settings["metadata"]["version"]
    urls = dict(line.split(" = ") for line in settings["metadata"]["project_urls"].strip().splitlines())

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({urls['Source']}/{kind}/v{version}/{link[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)]+)\)", absolute, (ROOT / "README.md").read_text())


setup(long_description=described(), long_description_content_type="text/markdown")
