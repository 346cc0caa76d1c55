"""``composer3d convert`` as a script: ``python tools/convert_checkpoint.py SRC DST --to hf|meta|torch|dcp``."""

import sys

from composer3d.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
