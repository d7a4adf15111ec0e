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
# cuBLAS is opened when it is asked for, and C++ stays behind the interface.
needed=$(readelf -d "$library")
if grep -E 'NEEDED.*lib(stdc\+\+|cublas)' <<<"$needed"; then
    echo "outside.sh: the library should not need these"
    exit 1
fi
# Nothing but the interface is visible.
if nm -D --defined-only "$library" | awk '{print $3}' | grep -v '^mz_'; then
    echo "outside.sh: these names should not be exported"
    exit 1
fi
if [ -x /usr/bin/python3 ]; then
    PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 "$root/kernels/example/selection.py" "$library"
fi
