#!/usr/bin/env bash
# Installs what a fresh Debian 12 or Ubuntu 24.04 lacks for building and testing. Safe to run again: when nothing is missing it only
# looks, asks for no password and touches no network. Needs no GPU and never installs CUDA.
#   scripts/setup.sh         compiler, CMake, Ninja and the libraries
#   scripts/setup.sh --dev   also clang, clang-format, clang-tidy (format check, static analysis, fuzzing) and ccache
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

packages=(g++ cmake ninja-build git python3 libcxxopts-dev nlohmann-json3-dev libgtest-dev libfmt-dev)
case ${1:-} in
  '') ;;
  --dev) packages+=(clang libclang-rt-dev clang-format clang-tidy ccache) ;;
  *) die "unknown argument '$1' (expected nothing or --dev)" ;;
esac

# The program a package brings; one that is on PATH from elsewhere (a newer CMake in /usr/local, say) counts as installed.
program_of() {
  case $1 in
    g++ | cmake | git | python3 | clang | clang-format | clang-tidy | ccache) echo "$1" ;;
    ninja-build) echo ninja ;;
  esac
}

is_installed() {
  local program
  program=$(program_of "$1")
  if [[ -n $program ]] && command -v "$program" >/dev/null 2>&1; then return 0; fi
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

distribution=unknown
if [[ -r /etc/os-release ]]; then
  distribution=$(. /etc/os-release && echo "${ID:-} ${ID_LIKE:-}")
fi

if [[ ! " $distribution " =~ \ (debian|ubuntu)\  ]] || ! command -v apt-get >/dev/null 2>&1; then
  for program in g++ cmake ninja; do
    command -v "$program" >/dev/null 2>&1 ||
      die "this is neither Debian nor Ubuntu and $program is missing: install g++ >= 12, CMake >= 3.25, Ninja, cxxopts, nlohmann-json, GoogleTest and fmt"
  done
  say "neither Debian nor Ubuntu: nothing installed; if CMake misses cxxopts, nlohmann_json, GTest or fmt, install them"
else
  missing=()
  for package in "${packages[@]}"; do
    is_installed "$package" || missing+=("$package")
  done
  if ((${#missing[@]} > 0)); then
    as_root=()
    if ((EUID != 0)); then
      command -v sudo >/dev/null 2>&1 || die "not root and no sudo; as root run: apt-get install ${missing[*]}"
      say "using sudo for apt-get"
      as_root=(sudo)
    fi
    say "installing: ${missing[*]}"
    apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120)
    "${apt[@]}" update
    "${apt[@]}" install -y --no-install-recommends "${missing[@]}"
  fi
fi

cmake_version=$(cmake --version | awk 'NR == 1 { print $3 }')
if [[ $(printf '%s\n' 3.25 "$cmake_version" | sort -V | head -n 1) != 3.25 ]]; then
  die "CMake $cmake_version is too old: 3.25 or newer is needed (Debian 12 and Ubuntu 24.04 have it; elsewhere: pip install cmake)"
fi

if nvcc=$(find_nvcc); then
  say "everything is there; CUDA compiler: $nvcc ($("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'))"
else
  say "everything is there; no CUDA compiler (nvcc) found: the build will be for the CPU alone"
fi
