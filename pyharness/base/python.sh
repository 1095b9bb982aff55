# For the scripts, to be sourced where $root is the checkout.

# need_python PROGRAM ends a script in words unless PROGRAM is a Python that is new enough.
need_python() {
    command -v "$1" >/dev/null || { echo "scripts/${0##*/}: no $1; install Python 3.10 or newer" >&2; exit 3; }
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "scripts/${0##*/}: Python 3.10 or newer is needed, this is $("$1" -V 2>&1); set PYTHON to a newer one" >&2; exit 3; }
}

# install_wheels PROGRAM DIR installs the .whl files of DIR into build/gpu-site, without network, for this script to import.
install_wheels() {
    ls "$2"/*.whl >/dev/null 2>&1 || { echo "scripts/${0##*/}: --wheels: no .whl files in '$2'" >&2; exit 2; }
    "$1" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
        --target "$root/build/gpu-site" "$2"/*.whl ||
        { echo "scripts/${0##*/}: --wheels: pip could not install them, see above" >&2; exit 3; }
    export PYTHONPATH="$root/build/gpu-site:$PYTHONPATH"
}
