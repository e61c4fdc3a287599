#!/usr/bin/env bash
# Checks that every C++ and CUDA file is formatted as .clang-format says; no file is exempt.
#   scripts/check_format.sh              check: the first place of every file that differs
#   scripts/check_format.sh --fix        format in place
#   scripts/check_format.sh --available  succeeds when a clang-format of version 14 or newer is installed
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

# Version 14 first: the tree is formatted with it.
clang_format=$(command -v clang-format-14 || command -v clang-format || true)
major=0
if [[ -n $clang_format ]]; then major=$("$clang_format" --version | sed -n 's/.*version \([0-9]*\).*/\1/p'); fi

mode=(--dry-run -Werror --ferror-limit=1)
case ${1:-} in
  '') ;;
  --fix) mode=(-i) ;;
  --available) exit $((major < 14)) ;;
  *) die "unknown argument '$1' (expected nothing, --fix or --available)" ;;
esac
((major >= 14)) || die "needs clang-format 14 or newer (scripts/setup.sh --dev installs one), found ${clang_format:-none}"

find src kernels -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -r "$clang_format" --style=file "${mode[@]}"
