#!/usr/bin/env bash
# outside.sh MESON BUILD SOURCE: installs into a temporary folder and builds outside.c against the
# installed library with pkg-config: as C and as C++ header, shared and static; then runs the examples.
set -euo pipefail

meson=$1 build=$2 here=$(dirname "$3") root=$(cd "$(dirname "$3")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$meson" install -C "$build" --no-rebuild --destdir "$work/root" >"$work/log" || { cat "$work/log"; exit 1; }
pc=$(find "$work/root" -name mizan-kernels.pc)
prefix=$(sed -n 's/^prefix=//p' "$pc")
export PKG_CONFIG_PATH=${pc%/*}
flags() {
    pkg-config --define-variable=prefix="$work/root$prefix" "$@" mizan-kernels
}
library=$(find "$work/root" -name libmizan-kernels.so)
export LD_LIBRARY_PATH=${library%/*}
# What pkg-config prints is words for a command line.
# shellcheck disable=SC2046
cc -Wall -Wextra -Werror -o "$work/shared" "$here/outside.c" $(flags --cflags --libs)
"$work/shared"
# shellcheck disable=SC2046
cc -o "$work/static" "$here/outside.c" $(flags --cflags --libs --static | sed 's/-lmizan-kernels/-l:libmizan-kernels.a/')
env -u LD_LIBRARY_PATH "$work/static"
# shellcheck disable=SC2046
printf '#include <mizan/kernels.h>\n' | cc -x c++ -Wall -Wextra -Werror -fsyntax-only $(flags --cflags) -
# shellcheck disable=SC2046
cc -Wall -Wextra -Werror -o "$work/layer" "$root/kernels/example/layer.c" $(flags --cflags --libs) -lm
"$work/layer"
# cuBLAS is opened when it is asked for, and C++ stays behind the interface: nothing is needed but these, the CUDA
# run-time where there is a device half.
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
[ -n "$needed" ] || { echo "outside.sh: readelf names nothing that $library needs"; exit 1; }
if grep -Ev '^(lib(openblas|cudart|c|m|dl|rt|pthread|gcc_s)|ld-linux[-a-z0-9_]*)\.so' <<<"$needed"; then
    echo "outside.sh: the library should not need these"
    exit 1
fi
# The same of the static one, whose objects name what they want; and no template library is inside.
archive=$(find "$work/root" -name libmizan-kernels.a)
names=$(nm "$archive" 2>/dev/null)
defined=$(awk 'NF == 3 && $2 ~ /[TDBRVW]/ {print $3}' <<<"$names" | sort -u)
wanted=$(awk '$1 == "U" {print $2}' <<<"$names" | sort -u)
if comm -23 <(echo "$wanted") <(echo "$defined") | grep -E '^(_Z|__cxa_|__gxx_|_Unwind)'; then
    echo "outside.sh: the static library should not need these of C++"
    exit 1
fi
if grep -E '3cub[0-9]|6thrust[0-9]|4cuda3std' <<<"$names"; then
    echo "outside.sh: names of CUB or Thrust in the static library"
    exit 1
fi
# A build with nvcc has the device half: what was looked at above is it, too.
if grep -q cudart <<<"$needed"; then
    grep -q ' U _*cudaLaunchKernel' <<<"$names" || { echo "outside.sh: a device half without kernels"; exit 1; }
fi
# Nothing but the interface is visible.
if nm -D --defined-only "$library" | awk '{print $3}' | grep -v '^mz_'; then
    echo "outside.sh: these names should not be exported"
    exit 1
fi
if [ -x /usr/bin/python3 ]; then
    PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 "$root/kernels/example/selection.py" "$library"
fi
