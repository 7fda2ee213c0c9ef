"""The process that moves the bytes of one part; `__main__` says how it is started."""
