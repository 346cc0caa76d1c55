import sys

from composer3d.cli import enter

if __name__ == "__main__":
    sys.exit(enter())
