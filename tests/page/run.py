"""Tests the page in a real browser with a real server: `run.py BINARY PICTURES [TEST ..]`.

Writes pictures of each view to PICTURES: light, dark and as wide as a phone. Exits with 1 if a test failed, or if none
ran.
"""

import os
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(binary, pictures, *names):
    os.environ["LOCKSTEP_BINARY"] = str(Path(binary).resolve())
    os.environ["PAGE_PICTURES"] = str(Path(pictures).resolve())
    Path(pictures).mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(HERE), str(HERE.parent / "clients")]
    loader = unittest.TestLoader()
    tests = loader.loadTestsFromNames(names) if names else loader.discover(str(HERE))
    result = unittest.TextTestRunner(verbosity=2, stream=sys.stdout).run(tests)
    n_failed = len(result.failures) + len(result.errors)
    n_passed = result.testsRun - n_failed - len(result.skipped)
    print(f"{n_passed} passed, {n_failed} failed")
    sys.exit(0 if n_passed > 0 and not n_failed else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
