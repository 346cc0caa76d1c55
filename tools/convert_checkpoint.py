"""Run ``composer3d convert``: ``python tools/convert_checkpoint.py SRC DST --to FORMAT``.

FORMAT is hf, meta, torch or dcp.
"""

import sys

from composer3d.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
