# shellcheck shell=bash
# Sourced by the other scripts: where the repository is, whether there is a GPU, how a build folder is configured.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
JOBS=${JOBS:-$(nproc)}

say() { printf '== %s\n' "$*"; }

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# True when a program could use a GPU now: a driver answers. A CUDA toolkit alone is not a GPU.
has_gpu() {
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# The CUDA compiler, where CMakeLists.txt looks for it too; prints nothing and fails when there is none.
find_nvcc() {
  local candidate
  for candidate in "${CUDACXX:-}" "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    if [[ -n $candidate && -x $candidate ]]; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

# configure BUILD_DIR [cmake options]: keeps the generator and compiler of a folder that was configured before.
configure() {
  local build=$1
  shift
  local options=()
  if [[ ! -f $build/CMakeCache.txt ]]; then
    options+=(-G Ninja)
    if command -v ccache >/dev/null 2>&1; then options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  fi
  cmake -S "$ROOT" -B "$build" "${options[@]}" "$@"
}
