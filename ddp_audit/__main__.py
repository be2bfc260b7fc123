"""``python -m ddp_audit``."""

from ddp_audit.cli.main import main

if __name__ == "__main__":
    main()
