#!/usr/bin/env python3
"""Runs fetch_fineweb.py against a server on 127.0.0.1 that breaks off, refuses, ignores ranges, or serves wrong files."""
import http.server
import os
import struct
import subprocess
import sys
import tempfile
import threading
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fetch_fineweb.py")
VAL, TRAIN = "fineweb_val_000000.bin", "fineweb_train_000001.bin"


def shard(tokens, magic=20240520, version=1, named=None):
    body = bytes((7 * i + tokens) & 0xFF for i in range(2 * tokens))
    return struct.pack("<256i", magic, version, tokens if named is None else named, *[0] * 253) + body


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        self.requests = []  # (name, Range header)
        self.break_after = []  # for the next requests: body bytes after which the connection closes
        self.failures = []  # for the next requests: status codes
        self.ranges = True
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/files"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        server, name, wanted = self.server, os.path.basename(self.path), self.headers.get("Range")
        server.requests.append((name, wanted))
        if server.failures:
            return self.send_error(server.failures.pop(0))
        data = server.files.get(name)
        if data is None:
            return self.send_error(404)
        start = 0
        if wanted and server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        sent = server.break_after.pop(0) if server.break_after else None
        self.wfile.write(data[start:] if sent is None else data[start : start + sent])


class FetchTest(unittest.TestCase):
    def setUp(self):
        self.server = Server()
        self.server.files = {VAL: shard(3000), TRAIN: shard(5000)}
        self.folder = tempfile.TemporaryDirectory()

    def tearDown(self):
        self.server.shutdown()
        self.server.server_close()
        self.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def content(self, name):
        with open(self.path(name), "rb") as file:
            return file.read()

    def put(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)

    def fetch(self, shards=1, attempts=1, **environment):
        command = [sys.executable, SCRIPT, str(shards), "--out", self.folder.name, "--attempts", str(attempts), "--timeout", "5", "--delay", "0"]
        return subprocess.run(command, env={**os.environ, "SPEEDRUN_FINEWEB_URL": self.server.url(), "no_proxy": "*", **environment},
                              capture_output=True, text=True)

    def assert_whole(self, *names):
        self.assertEqual(sorted(os.listdir(self.folder.name)), sorted(names))
        for name in names:
            self.assertEqual(self.content(name), self.server.files[name])

    def assert_refused(self, result, *parts):
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertEqual(len(result.stderr.strip().splitlines()), 1, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)

    def test_fetches_and_then_skips(self):
        self.assertEqual(self.fetch().returncode, 0)
        self.assert_whole(VAL, TRAIN)
        self.server.requests.clear()
        again = self.fetch()
        self.assertEqual(again.returncode, 0)
        self.assertIn("there already", again.stdout)
        self.assertEqual(self.server.requests, [])

    def test_validation_alone(self):
        self.assertEqual(self.fetch(shards=0).returncode, 0)
        self.assert_whole(VAL)

    def test_resumes_within_a_run(self):
        self.server.break_after = [2000, 1, 500]
        result = self.fetch(shards=0, attempts=4)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_whole(VAL)
        self.assertEqual([wanted for _, wanted in self.server.requests], [None, "bytes=2000-", "bytes=2001-", "bytes=2501-"])

    def test_resumes_in_the_next_run(self):
        self.server.break_after = [1500]
        self.assert_refused(self.fetch(shards=0), "1500 of 7024 bytes", "again")
        self.assertEqual(os.listdir(self.folder.name), [VAL + ".part"])
        self.assertEqual(self.fetch(shards=0).returncode, 0)
        self.assert_whole(VAL)
        self.assertEqual(self.server.requests[-1], (VAL, "bytes=1500-"))

    def test_broken_within_the_header(self):
        self.server.break_after = [100]
        self.assertEqual(self.fetch(shards=0, attempts=2).returncode, 0)
        self.assert_whole(VAL)

    def test_server_without_ranges_starts_anew(self):
        self.server.ranges = False
        self.server.break_after = [4000]
        self.assertEqual(self.fetch(shards=0, attempts=2).returncode, 0)
        self.assert_whole(VAL)

    def test_whole_part_is_only_renamed(self):
        self.put(VAL + ".part", self.server.files[VAL])
        self.assertEqual(self.fetch(shards=0).returncode, 0)
        self.assert_whole(VAL)

    def test_part_that_is_too_long_is_dropped(self):
        self.put(VAL + ".part", self.server.files[VAL] + b"more")
        self.assertEqual(self.fetch(shards=0, attempts=2).returncode, 0)
        self.assert_whole(VAL)

    def test_damaged_shard_is_fetched_anew(self):
        for damaged in (self.server.files[VAL][:-2], self.server.files[VAL] + b"x", b"", b"x" * 7024):
            self.put(VAL, damaged)
            result = self.fetch(shards=0)
            self.assertEqual(result.returncode, 0)
            self.assertIn("damaged", result.stderr)
            self.assert_whole(VAL)

    def test_missing_file(self):
        del self.server.files[TRAIN]
        self.assert_refused(self.fetch(attempts=3), TRAIN, "404")
        self.assertEqual(len(self.server.requests), 2)  # no second attempt at what is not there
        self.assert_whole(VAL)

    def test_busy_server_is_asked_again(self):
        self.server.failures = [503, 429, 500]
        self.assertEqual(self.fetch(shards=0, attempts=4).returncode, 0)
        self.assert_whole(VAL)

    def test_wrong_files_never_get_their_name(self):
        good = shard(3000)
        wrong = {
            "starts with 20240521": shard(3000, magic=20240521),
            "starts with 20240520, 7": shard(3000, version=7),
            "the 2999 tokens": shard(3000, named=2999),
            "the 3001 tokens": shard(3000, named=3001),
            "header alone": good[:900],
            "the 3000 tokens": good[:-1],
            "starts with": b"<!DOCTYPE html>" + b" " * 5000,
        }
        for message, data in wrong.items():
            self.server.files[VAL] = data
            self.assert_refused(self.fetch(shards=0), VAL, "no token shard", message)
            self.assertEqual(os.listdir(self.folder.name), [])

    def test_part_of_another_file(self):
        self.put(VAL + ".part", b"x" * 3000)
        self.assert_refused(self.fetch(shards=0), "no token shard")
        self.assertEqual(self.fetch(shards=0).returncode, 0)
        self.assert_whole(VAL)

    def test_no_server(self):
        result = self.fetch(attempts=2, SPEEDRUN_FINEWEB_URL="http://127.0.0.1:9/files")
        self.assertEqual(result.returncode, 1)
        self.assertIn("gave up after 2 attempts", result.stderr)

    def test_bad_arguments(self):
        for shards in (-1, 104):
            self.assertEqual(self.fetch(shards=shards).returncode, 2)

    def test_folder_that_is_a_file(self):
        self.put("file", b"")
        command = [sys.executable, SCRIPT, "0", "--out", self.path("file"), "--base-url", self.server.url()]
        self.assert_refused(subprocess.run(command, capture_output=True, text=True), "file")


if __name__ == "__main__":
    unittest.main()
