"""`python -m sherd` is the command `sherd`; under torchrun, `torchrun ... -m sherd train ...` starts its ranks."""

import sys

from sherd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
