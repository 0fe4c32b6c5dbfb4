"""Estimators in scikit-learn's conventions (extra `sklearn`); nothing else of the package imports them."""

try:
    from shf.sklearn.estimators import SHFClassifier, SHFRegressor
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("numpy", "scipy", "sklearn"):
        raise
    raise ImportError("shf.sklearn needs scikit-learn: pip install 'torch-shf[sklearn]'") from error

__all__ = ["SHFClassifier", "SHFRegressor"]
