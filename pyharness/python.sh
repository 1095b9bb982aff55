# For the scripts, to be sourced: need_python PROGRAM ends them in words unless PROGRAM is a Python that is new enough.
need_python() {
    command -v "$1" >/dev/null || { echo "scripts/${0##*/}: no $1; install Python 3.10 or newer" >&2; exit 3; }
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        { echo "scripts/${0##*/}: Python 3.10 or newer is needed, this is $("$1" -V 2>&1); set PYTHON to a newer one" >&2; exit 3; }
}
