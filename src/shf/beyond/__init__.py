"""What is beyond the paper, one idea to a module: off by default, described in docs/fast.md."""
