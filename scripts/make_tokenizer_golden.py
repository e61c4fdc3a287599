#!/usr/bin/env python3
"""Write the tokenizer's golden files with tiktoken: src/data/testdata/tokenizer_golden.txt and tokenizer_code_points.txt.

    python3 scripts/make_tokenizer_golden.py [--vocab data/gpt2_vocab] [--out src/data/testdata]

tokenizer_golden.txt: a case a line: name, vocabulary size, input, ids, separated by blanks. The input is hexadecimal bytes (not always
valid UTF-8; "-" if empty), with "HEX*N" for N repetitions; the ids are joined by commas ("-" if none), or "COUNT:HASH" if they are many.
tokenizer_code_points.txt: for every block of 4096 code points the hash of the ids of " a<c>b", "<c><c>" and " <c>1" for each c in it.
Hash: FNV-1a over 16-bit ids, 64 bits. Needs the Python package tiktoken.
"""
import argparse
import os
import random

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT2_SIZE = 50257
END_OF_DOCUMENT = 0xFFFF  # between the strings of a hash; no token has this id


def encodings(vocab_dir, sizes):
    ranks = data_gym_to_mergeable_bpe_ranks(os.path.join(vocab_dir, "vocab.bpe"), os.path.join(vocab_dir, "encoder.json"))
    return {
        size: tiktoken.Encoding(
            f"gpt2_{size}",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for token, rank in ranks.items() if rank < size - 1},
            special_tokens={"<|endoftext|>": size - 1},
        )
        for size in sizes
    }


def fnv(ids, start=0xCBF29CE484222325):
    for i in ids:
        start = (start ^ i) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return start


def named_texts():
    white = [chr(c) for c in range(0x110000) if chr(c).isspace() or c in (0x180E, 0x200B, 0x200C, 0x2060, 0xFEFF)]
    yield "empty", ""
    yield "hello", "Hello, world! The quick brown fox jumps over the lazy dog."
    yield "end_of_text_is_text", "one<|endoftext|>two <|endoftext|> <|endoftext|>"
    yield "contractions", "I'm you're he's she'll we've they'd isn't 'tis 's's 'S 'LL 'Ve 'llama 'velo 'reed 'd't'm''s ' s !'s x's 's"
    yield "contraction_ends", "' 'l 'v 'r 'll"
    yield "contraction_unicode", "l’été it’s ça'd naïve're Ωmega've 1's 2'll 猫's"
    yield "numbers", "1 12 123 1234567890 3.14159 1,000,000 0x1F 1e-9 ½ ² Ⅷ ٣ ४५ 一二三 १२३abc123 x86_64 5th"
    yield "punctuation", "!!! ... --- ??!! (a) [b] {c} <d> «e» “f” ‘g’ — – … @#$%^&*_+=|\\~`/ :-) ;) ///comment ==== #####"
    yield "code", "int main() {\n\tfor (int i = 0; i < n; ++i) {\n        x[i] += y->z;  // why\n\t}\n\n    return 0;\n}\n"
    for run in range(1, 9):
        yield f"spaces_{run}", " " * run + "a" + " " * run + "1" + " " * run + "!" + " " * run + "'s" + " " * run
        yield f"newlines_{run}", "\n" * run + "a" + "\n" * run + " b" + "\r\n" * run + "\t" * run + "c" + " \n" * run
    yield "blanks_only", " \n \t \r\n  "
    for i, w in enumerate(white):
        yield f"white_{ord(w):04x}", f"a{w}b {w}c{w} d{w}{w}e {w} 1{w}!{w}{w}\n{w}'s{w}"
        yield f"white_end_{ord(w):04x}", f"x{w}" if i % 2 else f"x {w}"
    yield "accents", "Ünïcödé naïve façade Ångström ﬁ ﬃ ß ẞ ĳ Ǆ İstanbul ŉ"
    yield "combining", "e\u0301 a\u0308\u0304b n\u0303o \u0301x  \u0301 q\u0300\u0301\u0302\u0303 1\u20e3 Z\u0351\u036b\u0343\u036a"
    yield "cyrillic", "Привет, мир! Съешь же ещё этих мягких французских булок. № 5"
    yield "greek", "Ελληνικά: Τάχιστη αλώπηξ βαφής ψημένη γη, ᾧ ῥώμη"
    yield "hebrew_arabic", "שָׁלוֹם עולם مرحبا بالعالم ١٢٣ ۱۲۳ اَلْعَرَبِيَّةُ \u200fx\u200e"
    yield "indic_thai", "नमस्ते दुनिया বাংলা தமிழ் ภาษาไทย ๑๒๓ ລາວ မြန်မာ ខ្មែរ"
    yield "cjk", "你好，世界！今天天气很好。日本語のテスト、カタカナ。한국어 시험 텍스트 ㍿ 〇 ＡＢＣ　１２３"
    yield "cjk_extensions", "𠀀𠀁 𪜀 𫝀 𰀀 \U0002ebf0 \U000323af"
    yield "emoji", "😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪🇫🇷 ❤️ ✈️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🫠🪿 a😀b 😀1"
    yield "other_planes", "𝒳𝔘𝟘𝟙 𐍈𐌰 𓀀 𒀀 𐄇 🄰 \U000e0001 \U000f0000 \U0010ffff \ufffe \uffff \ufdd0"
    yield "controls", "".join(chr(c) for c in range(32)) + "\x7f\x80\x9f\xad"
    yield "latin1", "".join(chr(c) for c in range(256))
    yield "zero_width", "a\u200bb\u200cc\u200dd\u2060e\ufefff\u180eg"
    yield "long_token", "-" * 64 + " " + "=" * 64 + " " + "_" * 32 + " ÃÂ" + "ÃÂ" * 40 + " " + "*" * 64 + "." * 64
    yield "long_word", "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft internationalization"
    yield "key_borders", " ".join("abcdefghijklmnopqrstuvwxyzabcdefghij"[:n] for n in range(1, 37))
    yield "nul_words", "\0 \0\0 \0\0\0\0\0\0\0\0\0 a\0b"


def invalid_inputs():
    yield "lone_continuation", b"a\x80b \xbf\xbf"
    yield "lone_lead", b"a\xc3 \xe2b \xf0\xc3"
    yield "truncated_end_2", "é".encode()[:1]
    yield "truncated_end_3", b"x" + "€".encode()[:2]
    yield "truncated_end_4", b"x" + "😀".encode()[:3]
    yield "truncated_middle", b"\xe2\x82x\xf0\x9f\x98y\xf0\x9fz\xf0w"
    yield "overlong", b"\xc0\x80 \xc1\xbf \xe0\x80\x80 \xe0\x9f\xbf \xf0\x80\x80\x80 \xf0\x8f\xbf\xbf"
    yield "surrogates", b"\xed\xa0\x80 \xed\xbf\xbf \xed\xa0\xbd\xed\xb8\x80"
    yield "too_large", b"\xf4\x90\x80\x80 \xf5\x80\x80\x80 \xff\xfe \xf8\x88\x80\x80\x80"
    yield "latin1_text", "Fußgängerübergänge, déjà vu".encode("latin-1")
    yield "utf16_text", "plain".encode("utf-16")
    rng = random.Random(5)
    for i in range(40):
        good = "".join(rng.choice("aé€😀 1!") for _ in range(24)).encode()
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.choice([0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF, 0x41, rng.randrange(256)])
        yield f"damaged_{i}", bytes(damaged)
    for i in range(10):
        yield f"random_bytes_{i}", rng.randbytes(120)


def random_text(rng):
    ranges = [(0x20, 0x7F)] * 4 + [(0, 0x250), (0x250, 0x800), (0x800, 0x2000), (0x2000, 0x3100), (0x3100, 0xD800), (0xE000, 0x11000)]
    ranges += [(0x11000, 0x20000), (0x1F300, 0x1FB00), (0x20000, 0x32000), (0x32000, 0x110000), (0x09, 0x0E), (0x2000, 0x2010)]
    text = ""
    while len(text) < 40:
        low, high = rng.choice(ranges)
        text += "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 7))) + rng.choice(["", "", " ", "  ", "\n", "'s"])
    return text


def random_words(rng):
    """Words of few letters, so that merges compete."""
    return " ".join("".join(rng.choice("etaoinshrdl") for _ in range(rng.randrange(1, 30))) for _ in range(12))


def line(name, size, data, ids, written=None):
    joined = ",".join(map(str, ids)) or "-"
    if len(ids) > 400:
        joined = f"{len(ids)}:{fnv(ids):016x}"
    return f"{name} {size} {written or data.hex() or '-'} {joined}"


def golden_lines(by_size):
    def ids(size, data):
        return by_size[size].encode_ordinary(data.decode("utf-8", errors="replace"))

    cases = [(name, text.encode()) for name, text in named_texts()] + list(invalid_inputs())
    rng = random.Random(7)
    cases += [(f"random_text_{i}", random_text(rng).encode()) for i in range(150)]
    cases += [(f"random_words_{i}", random_words(rng).encode()) for i in range(40)]
    for name, data in cases:
        yield line(name, GPT2_SIZE, data, ids(GPT2_SIZE, data))
    for size in sorted(by_size):
        if size == GPT2_SIZE:
            continue
        for name, data in cases[:40] + cases[-45:-30] + cases[-10:]:
            yield line(name, size, data, ids(size, data))
    for name, unit, count in [
        ("run_a", b"a", 100000),
        ("run_newline", b"\n", 5000),
        ("run_space", b" ", 5001),
        ("run_space_word", b"          x", 3000),
        ("run_dash", b"-", 70001),
        ("run_digits", b"0123456789", 7000),
        ("run_ab", b"ab", 30000),
        ("run_cjk", "猫".encode(), 20000),
        ("run_the", b" the", 50000),
        ("run_mixed", "xyzzy Ünï ".encode(), 6000),
    ]:
        yield line(name, GPT2_SIZE, unit * count, ids(GPT2_SIZE, unit * count), f"{unit.hex()}*{count}")


def code_point_lines(encoding):
    for start in range(0, 0x110000, 4096):
        texts = []
        for c in range(start, start + 4096):
            if not 0xD800 <= c < 0xE000:
                texts += [f" a{chr(c)}b", chr(c) * 2, f" {chr(c)}1"]
        value = 0xCBF29CE484222325
        for ids in encoding.encode_ordinary_batch(texts):
            value = fnv(ids + [END_OF_DOCUMENT], value)
        yield f"{start:06x} {value:016x}"


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", default=os.path.join(root, "data", "gpt2_vocab"))
    parser.add_argument("--out", default=os.path.join(root, "src", "data", "testdata"))
    args = parser.parse_args()
    by_size = encodings(args.vocab, [257, 300, 4096, 30000, GPT2_SIZE])
    for name, lines in [("tokenizer_golden.txt", golden_lines(by_size)), ("tokenizer_code_points.txt", code_point_lines(by_size[GPT2_SIZE]))]:
        with open(os.path.join(args.out, name), "w", encoding="ascii") as out:
            out.writelines(text + "\n" for text in lines)


if __name__ == "__main__":
    main()
