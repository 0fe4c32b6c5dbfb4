"""The laboratory: the paper's experiments, from data to report. Needs the extra ``shf[lab]``."""
