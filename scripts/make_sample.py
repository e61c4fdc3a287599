#!/usr/bin/env python3
"""Make the bundled sample, data/sample/sample_{train,val}_000.bin, from plain text.

    python3 scripts/make_sample.py --train TEXT --val TEXT [--speedrun build/speedrun] [--out data/sample] [--vocab-size 4096]

TEXT is UTF-8; byte 0x1E stands between works (books, articles). Each is cleaned (typographic quotes and dashes become ASCII, which a
small vocabulary spends fewer tokens on; marks of emphasis, title pages, tables of contents and verse are dropped) and cut at paragraph ends into documents whose
lengths are spread like those of web pages. The documents are shuffled with a fixed seed and tokenised by `speedrun data tokenize`, so the
same text always gives the same shards. data/README.md names the works in the sample.
"""
import argparse
import os
import random
import re
import subprocess
import tempfile
import zlib

SEPARATOR = "\x1e"
SHORTEST, LONGEST = 500, 9000  # characters of a document
ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "\u00a0": " ", "æ": "ae", "œ": "oe", "Æ": "Ae"})
EDITION = re.compile(r"Produced by|Transcribed from|Project Gutenberg|email@example|\[Illustration|\[Picture|ILLUSTRAT|All rights reserved", re.I)


def is_prose(paragraph):
    """Running text, not a title, a list, verse, or a heading."""
    if EDITION.search(paragraph) or len(paragraph) < 2:
        return False
    letters = [c for c in paragraph if c.isalpha()]
    if len(letters) < 0.68 * len(paragraph) - 4 or sum(c.isupper() for c in letters) > 0.25 * len(letters) + 5:
        return False
    return paragraph[-1] in ".!?\"':;,-)]" and not (paragraph[0].isdigit() and len(paragraph) < 60)


def paragraphs_of(work):
    """Paragraphs in order; None where text was left out between two of them."""
    work = work.translate(ASCII).replace("\r\n", "\n")
    work = re.sub(r"(?<!\w)[_*]+(?=\S)|(?<=\S)[_*]+(?!\w)", "", work)
    for paragraph in re.split(r"\n\s*\n", work):
        lines = [line.strip() for line in paragraph.split("\n") if line.strip()]
        # Hard-wrapped prose has long lines; verse and tables have short ones.
        wrapped = len(lines) > 1 and sum(map(len, lines[:-1])) >= 50 * (len(lines) - 1)
        for text in [" ".join(lines)] if wrapped else lines:
            text = re.sub(r"\s+", " ", text)
            yield text if is_prose(text) and text.isascii() else None


def documents_of(work):
    """Cuts a work into documents; where text was left out (a chapter's head, a page of verse) a document ends too."""
    rng = random.Random(zlib.crc32(work.encode()))

    def target():
        return min(LONGEST, max(SHORTEST, rng.lognormvariate(7.7, 0.7)))

    wanted, held = target(), []
    for paragraph in [*paragraphs_of(work), None]:
        if paragraph is not None:
            held.append(paragraph)
        length = sum(map(len, held))
        if length >= wanted or paragraph is None:
            if length >= SHORTEST:
                yield "\n\n".join(held) + "\n"
            wanted, held = target(), []


def read_documents(path, seed):
    with open(path, encoding="utf-8") as file:
        works = file.read().split(SEPARATOR)
    documents = [document for work in works for document in documents_of(work)]
    random.Random(seed).shuffle(documents)
    return documents


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="text of the training documents")
    parser.add_argument("--val", required=True, help="text of the validation documents, from other works")
    parser.add_argument("--speedrun", default=os.path.join(root, "build", "speedrun"))
    parser.add_argument("--vocab", default=os.path.join(root, "data", "gpt2_vocab"))
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--out", default=os.path.join(root, "data", "sample"))
    args = parser.parse_args()

    train, val = read_documents(args.train, 1), read_documents(args.val, 2)
    if set(train) & set(val):
        parser.error("a document is in both --train and --val")
    os.makedirs(args.out, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        for name, documents in [("sample_train", train), ("sample_val", val)]:
            text = os.path.join(folder, name + ".txt")
            with open(text, "w", encoding="utf-8", newline="\n") as file:
                file.write(SEPARATOR.join(documents))
            prefix = os.path.join(folder, name)
            flags = ["--separator", "\\x1e", "--vocab", args.vocab, "--vocab-size", str(args.vocab_size), "--shard-tokens", "1000000000"]
            subprocess.run([args.speedrun, "data", "tokenize", text, "--out", prefix, *flags], check=True)
            os.replace(prefix + "_000.bin", os.path.join(args.out, name + "_000.bin"))


if __name__ == "__main__":
    main()
