import sys

from composer3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
