"""Named settings, the paper's and ours."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class presets:  # noqa: N801 - used as a namespace: shf.presets.classifier
    """Settings to be unpacked: `shf.SHF(model, loss, **shf.presets.classifier)`. `fast` is beyond the paper, the others are
    its experiments'."""

    classifier: Mapping[str, Any] = MappingProxyType(
        {"damping": 1.0, "cg_iterations": 3, "curvature_batch": 100, "weight_decay": 5e-4}
    )
    """§5: gradient batches of 1000 rows, no dropout."""

    dropout_classifier: Mapping[str, Any] = MappingProxyType(
        {"damping": 1.0, "cg_iterations": 3, "curvature_batch": 100, "weight_decay": 2e-5, "update_decay": 0.998}
    )
    """§5 with dropout on the inputs and the last hidden layer; β decays by the author's 0.998 per epoch."""

    autoencoder: Mapping[str, Any] = MappingProxyType(
        {"damping": 10.0, "cg_iterations": 25, "weight_decay": 0.0, "momentum_off_on_divergence": True}
    )
    """§5.2, CURVES: gradient and curvature batches of 2000 rows. λ = 10 belongs to a loss that is summed over outputs and
    averaged over cases, `shf.losses.per_case(...)`: torch's mean over all elements is hundreds of times smaller, and there
    this damping would freeze the network."""

    fast: Mapping[str, Any] = MappingProxyType(
        {
            "damping": "auto",
            "damping_factor": 0.7,
            "damping_rise": 4.0,
            "cg_iterations": 2,
            "cg_noise": 0.3,
            "cg_decay": 0.0,
            "backtracking": None,
            "preconditioner": "kronecker",
            "decay_direction": True,
            "averaging": "auto",
            "noise_every": 10,
        }
    )
    """Beyond the paper ([docs/fast.md](fast.md)): nothing in it belongs to the scale of a loss. Feed it from
    `shf.GrowingLoader`, evaluate within `optimizer.averaged()`."""

    residual: Mapping[str, Any] = MappingProxyType(
        {
            "solver": "trust-region",
            "damping": 1e-15,
            "damping_factor": 1.0,
            "cg_decay": 0.0,
            "preconditioner": None,
            "backtracking": None,
        }
    )
    """For sums of squares without noise, all rows in each step: physics-informed problems, surrogates, small tables. Exact
    steps, as long as the model holds; nothing to set. In double precision: `model.double()`."""
