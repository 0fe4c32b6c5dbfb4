"""Rules for λ: the paper's, one that listens to unseen data, and where λ begins."""
