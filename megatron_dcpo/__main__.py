"""``python -m megatron_dcpo VERB``: the same as the console script ``dcpo VERB``."""

import sys

from megatron_dcpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
