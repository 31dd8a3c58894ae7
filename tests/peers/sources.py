"""Fetches the source packages that hold the peers' own tests, and unpacks the tests: `sources.py FOLDER`.

A package is downloaded directly: pip would build its metadata first, which requires the peers' compilers.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

# The package, and the target folder of each of its folders.
SOURCES = {
    ("vllm", "0.33.0"): {"tests": "vllm/tests"},
    ("llama-cpp-python", "0.3.36"): {
        "vendor/llama.cpp/tools/server/tests": "llama.cpp/tools/server/tests",
        "vendor/llama.cpp/models/templates": "llama.cpp/models/templates",
    },
}
# This file imports all of vLLM; the plugin defines the parts that the tests need.
REMOVED = ["vllm/tests/conftest.py"]
OWN_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
TIMEOUT_S = 60


def index():
    """Returns the index that pip would use: the configured one, or its own default."""
    configured = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True)
    url = os.environ.get("PIP_INDEX_URL") or configured.stdout.decode().strip()
    return url or subprocess.check_output([sys.executable, "-c", OWN_INDEX], text=True).strip()


def fetched(name, version, to):
    page_url = f"{index().rstrip('/')}/{name}/"
    with urllib.request.urlopen(page_url, timeout=TIMEOUT_S) as page:
        links = re.findall(r'href="([^"]+)"[^>]*>([^<]+)<', page.read().decode())
    file = f"{name.replace('-', '_')}-{version}.tar.gz"
    link = next(html.unescape(url) for url, text in links if text == file)
    path = to / file
    url = urllib.parse.urljoin(page_url, link).split("#")[0]
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as packed, open(path, "wb") as out:
        shutil.copyfileobj(packed, out)
    return path


def unpack(path, folders, to):
    with tarfile.open(path) as packed:
        for member in packed:
            inner = member.name.split("/", 1)[-1]
            for folder, place in folders.items():
                if member.isfile() and inner.startswith(folder + "/"):
                    out = to / (place + inner[len(folder):])
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.write_bytes(packed.extractfile(member).read())


def main(folder):
    to = Path(folder)
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for (name, version), folders in SOURCES.items():
        path = fetched(name, version, to)
        unpack(path, folders, to)
        path.unlink()
    for path in REMOVED:
        (to / path).unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
