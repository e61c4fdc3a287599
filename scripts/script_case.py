"""What tests of the scripts share: a folder of their own, and a stand-in for `speedrun`."""

import os
import pathlib
import sys
import tempfile
import unittest


class Folder(unittest.TestCase):
    """self.folder, with a space in its name; gone after the test."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="speedrun scripts ")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def make_stub(self, text):
        """An executable of these lines of Python, which sees neither our modules nor our environment's."""
        stub = self.folder / "stub"
        stub.write_text(f"#!{sys.executable} -IS\n{text}", encoding="utf-8")
        stub.chmod(0o755)
        return stub


def executable_argument():
    """The first argument, if it is a file: taken from the command line, made absolute. Else None."""
    return os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 and os.path.isfile(sys.argv[1]) else None
