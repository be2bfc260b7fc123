"""ddp-audit: do my N GPUs do the work of N?"""

__version__ = "0.1.0"
