"""Runs the tests that use real clients: `run.py BINARY [TEST ..]`, as `run.py target/debug/lockstep test_openai`.

Prints how many tests passed and failed. Exits with 1 if any failed or none ran.
"""

import os
import sys
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Result(unittest.TextTestResult):
    """Prints the log of the module's server after each failure."""

    def addError(self, test, error):
        super().addError(test, error)
        self.print_log(test)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.print_log(test)

    def print_log(self, test):
        server = getattr(sys.modules.get(type(test).__module__), "server", None)
        if server is not None and not server.log.closed:
            server.print_log()


def main(binary, *names):
    os.environ["LOCKSTEP_BINARY"] = str(Path(binary).resolve())
    # Frameworks have packages of their own, so they run only when they are named.
    sys.path[:0] = [str(HERE), str(HERE / "frameworks"), str(HERE / "more")]
    loader = unittest.TestLoader()
    tests = loader.loadTestsFromNames(names) if names else loader.discover(str(HERE))
    result = unittest.TextTestRunner(verbosity=2, resultclass=Result, stream=sys.stdout).run(tests)
    n_failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    # A module whose server does not start is an error without a test.
    n_passed = max(0, result.testsRun - n_failed - len(result.skipped))
    print(f"{n_passed} passed, {n_failed} failed")
    sys.exit(0 if n_passed and not n_failed else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
