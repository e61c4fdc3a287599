#!/usr/bin/env python3
"""Write src/data/unicode_tables.cpp: the class of every code point as tiktoken's regular expressions see it.

    python3 scripts/make_unicode_tables.py [--out src/data/unicode_tables.cpp]

The classes are asked of tiktoken itself (its Rust regex crate brings its own Unicode version, which is not Python's): a pattern that
matches one class, run over all code points, keeps exactly the members of the class. Needs the Python package tiktoken; no vocabulary.
"""
import argparse
import os

import tiktoken

CODE_POINTS = 0x110000
BLOCK = 256
# The order is that of enum class CodePointClass.
CLASSES = [r"[^\s\p{L}\p{N}]", r"\p{L}", r"\p{N}", r"\s"]


def members(pattern):
    """All code points that the pattern matches, surrogates left out (UTF-8 cannot hold them)."""
    encoding = tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={})
    text = "".join(chr(c) for c in range(CODE_POINTS) if not 0xD800 <= c < 0xE000)
    return [ord(c) for c in bytes(encoding.encode_ordinary(text)).decode()]


def rows(values, width):
    """Comma-separated values in lines of at most `width` columns."""
    line = ""
    for value in values:
        if len(line) + len(value) + 2 > width:
            yield line.rstrip()
            line = ""
        line += value + ", "
    yield line.rstrip()


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(root, "src", "data", "unicode_tables.cpp"))
    args = parser.parse_args()

    table = bytearray(CODE_POINTS)
    counts = []
    for value, pattern in enumerate(CLASSES):
        found = members(pattern)
        counts.append(len(found))
        for code_point in found:
            table[code_point] = value
    assert sum(counts) == CODE_POINTS - 0x800, "every code point must be in exactly one class"

    blocks, index = {}, []
    for start in range(0, CODE_POINTS, BLOCK):
        classes = table[start : start + BLOCK]
        packed = bytes(sum(classes[i + j] << (2 * j) for j in range(4)) for i in range(0, BLOCK, 4))
        index.append(blocks.setdefault(packed, len(blocks)))
    assert len(blocks) <= 256

    with open(args.out, "w", encoding="ascii") as out:
        print("// Made by scripts/make_unicode_tables.py from tiktoken", tiktoken.__version__, "(do not edit):", file=out)
        print("//", counts[1], "letters,", counts[2], "numbers,", counts[3], "white-space code points.", file=out)
        print('#include "src/data/unicode.h"\n\nnamespace speedrun::unicode {\n\n// clang-format off', file=out)
        print(f"const uint8_t kBlockOfCodePoint[{len(index)}] = {{", file=out)
        print("\n".join(rows([str(i) for i in index], 130)), file=out)
        print(f"}};\n\nconst uint8_t kClassesOfBlock[][{BLOCK // 4}] = {{", file=out)
        for packed in blocks:
            print("{", "\n".join(rows([str(b) for b in packed], 128)).rstrip(","), "},", sep="", file=out)
        print("};\n// clang-format on\n\n}  // namespace speedrun::unicode", file=out)


if __name__ == "__main__":
    main()
