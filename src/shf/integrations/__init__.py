"""Adapters to frameworks that own the training loop; see docs/integrations.md. Each module imports its framework, and shf
imports none of them: `from shf.integrations.lightning import SHFMixin`."""
