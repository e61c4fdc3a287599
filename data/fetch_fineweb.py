#!/usr/bin/env python3
"""Fetch FineWeb as GPT-2 token shards (kjj0/fineweb10B-gpt2 on the Hugging Face hub): 0.2 GB, 100 million tokens a shard.

    python3 data/fetch_fineweb.py 10                # the validation shard and training shards 1 to 10 into data/fineweb
    python3 data/fetch_fineweb.py 4 --out /scratch  # into another folder

Shards that are there and whole are skipped; a download that broke off goes on where it stopped when the command is given again. Each shard
is checked against the size the server names and against its own header before it gets its name. Only Python's standard library is needed.
"""
import argparse
import errno
import http.client
import os
import struct
import sys
import time
import urllib.error
import urllib.request

BASE_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
NUM_TRAIN_SHARDS = 103
HEADER_BYTES, TOKEN_BYTES = 1024, 2
MAGIC, VERSION = 20240520, 1
CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """What went wrong, in one line; trying again at once would not help."""


class BrokenOff(Exception):
    """The connection failed; the part that arrived is kept, and the next attempt goes on after it."""


def header_fault(header, size):
    """Why a file of `size` bytes that starts with `header` is no shard; nothing if it is one."""
    if len(header) < HEADER_BYTES:
        return f"{size} bytes, a shard's header alone has {HEADER_BYTES}"
    magic, version, tokens = struct.unpack("<3i", header[:12])
    if (magic, version) != (MAGIC, VERSION):
        return f"starts with {magic}, {version}; a token shard starts with {MAGIC}, {VERSION}"
    expected = HEADER_BYTES + TOKEN_BYTES * tokens
    if size != expected:
        return f"{size} bytes, the {tokens} tokens of its header need {expected}"
    return None


def file_fault(path):
    with open(path, "rb") as file:
        return header_fault(file.read(HEADER_BYTES), os.path.getsize(path))


class Response:
    """An open answer to a request for `url` from byte `offset` on. `offset` becomes 0 if the server sends the whole file instead."""

    def __init__(self, url, offset, timeout):
        request = urllib.request.Request(url, headers={"User-Agent": "speedrun-fetch", "Accept-Encoding": "identity"})
        if offset > 0:
            request.add_header("Range", f"bytes={offset}-")
        try:
            self.body = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as fault:
            if fault.code == 416:  # nothing lies after `offset`
                self.body, self.offset = None, offset
                total = fault.headers.get("Content-Range", "").rpartition("/")[2]
                self.total = int(total) if total.isdigit() else -1
                return
            message = f"{url}: the server answers {fault.code} {fault.reason}"
            raise (BrokenOff if fault.code in (408, 429) or fault.code >= 500 else FetchError)(message) from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as fault:
            raise BrokenOff(f"{url}: {getattr(fault, 'reason', None) or fault or type(fault).__name__}") from None
        length = self.body.headers.get("Content-Length")
        if length is None or not length.isdigit():
            raise FetchError(f"{url}: the server does not say how long the file is")
        self.offset = offset if self.body.status == 206 else 0
        self.total = self.offset + int(length)
        if self.body.status == 206:
            content_range = self.body.headers.get("Content-Range", "")
            if content_range != f"bytes {offset}-{self.total - 1}/{self.total}":
                raise FetchError(f"{url}: asked for bytes {offset}-, the server sends {content_range or 'no Content-Range'}")

    def chunks(self):
        try:
            while chunk := self.body.read(CHUNK_BYTES):
                yield chunk
        except (http.client.HTTPException, OSError) as fault:
            raise BrokenOff(f"the connection broke: {fault or type(fault).__name__}") from None
        finally:
            self.body.close()


def show_progress(name, held, total):
    if sys.stderr.isatty():
        end = "\n" if held == total else "\r"
        print(f"{name}: {held / 1e6:.1f} of {total / 1e6:.1f} MB", end=end, file=sys.stderr, flush=True)


def receive(url, part, timeout):
    """One attempt: appends to `part` what it lacks of the file at `url`. Returns when it is whole and its header is right."""
    held = os.path.getsize(part) if os.path.exists(part) else 0
    response = Response(url, held, timeout)
    if response.body is None:
        if response.total != held:  # longer than the file: not a part of it
            os.remove(part)
            raise BrokenOff(f"{part}: {held} bytes, longer than the file; starting anew")
    else:
        held = response.offset
        with open(part, "r+b" if held > 0 else "w+b") as file:
            file.seek(held)
            file.truncate()
            header_checked = False
            for chunk in response.chunks():
                file.write(chunk)
                held += len(chunk)
                if not header_checked and held >= HEADER_BYTES:
                    check_header(file, part, url, response.total)
                    header_checked = True
                show_progress(os.path.basename(url), held, response.total)
            file.flush()
            os.fsync(file.fileno())
        if held < response.total:
            raise BrokenOff(f"the connection ended after {held} of {response.total} bytes")
    fault = file_fault(part)
    if fault:
        os.remove(part)
        raise FetchError(f"{url}: no token shard: {fault}")


def check_header(file, part, url, total):
    """Finds a wrong file after its first bytes, not after all of it."""
    file.flush()
    file.seek(0)
    fault = header_fault(file.read(HEADER_BYTES), total)
    file.seek(0, os.SEEK_END)
    if fault:
        os.remove(part)
        raise FetchError(f"{url}: no token shard: {fault}")


def fetch(url, path, args):
    """True: fetched. False: was there."""
    if os.path.exists(path):
        fault = file_fault(path)
        if not fault:
            return False
        print(f"{path}: damaged ({fault}): fetching it anew", file=sys.stderr)
    part = path + ".part"
    for attempt in range(1, args.attempts + 1):
        try:
            receive(url, part, args.timeout)
            os.replace(part, path)
            return True
        except BrokenOff as fault:
            if attempt == args.attempts:
                raise FetchError(f"{fault}; gave up after {attempt} attempts: give the command again to go on") from None
            print(f"{fault}; attempt {attempt + 1} of {args.attempts}", file=sys.stderr)
            time.sleep(min(30, args.delay * 2 ** (attempt - 1)))
    raise AssertionError("unreachable")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fineweb")
    parser.add_argument("shards", type=int, nargs="?", default=10, help=f"training shards, 0 to {NUM_TRAIN_SHARDS} (default 10)")
    parser.add_argument("--out", default=folder, help="folder (default data/fineweb)")
    parser.add_argument("--base-url", default=os.environ.get("SPEEDRUN_FINEWEB_URL", BASE_URL),
                        help="a mirror; also from the environment variable SPEEDRUN_FINEWEB_URL")
    parser.add_argument("--attempts", type=int, default=8, help="connections tried for each shard (default 8)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds without a byte after which a connection counts as broken (default 60)")
    parser.add_argument("--delay", type=float, default=1, help="seconds before the second attempt; doubled each time, at most 30 (default 1)")
    args = parser.parse_args()
    if not 0 <= args.shards <= NUM_TRAIN_SHARDS:
        parser.error(f"shards: {args.shards}; expected 0 to {NUM_TRAIN_SHARDS}")
    if args.attempts < 1 or args.timeout <= 0 or args.delay < 0:
        parser.error("--attempts and --timeout must be positive, --delay not negative")
    return args


def main():
    args = arguments()
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, args.shards + 1)]
    try:
        os.makedirs(args.out, exist_ok=True)
        fetched = 0
        for name in names:
            new = fetch(f"{args.base_url.rstrip('/')}/{name}", os.path.join(args.out, name), args)
            fetched += new
            print(f"{name}: {'fetched' if new else 'there already'}", flush=True)
    except FetchError as fault:
        sys.exit(f"fetch_fineweb: {fault}")
    except OSError as fault:
        hint = ": free some space and give the command again to go on" if fault.errno == errno.ENOSPC else ""
        sys.exit(f"fetch_fineweb: {fault.filename or args.out}: {fault.strerror}{hint}")
    except KeyboardInterrupt:
        print("\nfetch_fineweb: stopped; give the command again to go on", file=sys.stderr)
        sys.exit(130)
    print(f"{len(names)} shards in {args.out}, {fetched} of them new")


if __name__ == "__main__":
    main()
