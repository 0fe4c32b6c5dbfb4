"""Settings: what is out of range is refused where it is given, by name, value and range."""

import dataclasses
import inspect
import math
import runpy
from pathlib import Path
from typing import Unpack, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import shf
from helpers import labelled, mlp, valued
from shf import options as options_file
from shf.options import Options

NAN, INF = math.nan, math.inf

OUT_OF_RANGE = {
    "damping": ([0, -1.0, NAN, INF, "1", None, True], "a number greater than 0, or 'auto'"),
    "solver": (["lu", None, True], "one of 'cg', 'dense', 'rows', 'auto', 'trust-region'"),
    "target_ratio": ([0.0, 1.0, -0.1, NAN, None], "a number greater than 0 and below 1"),
    "damping_rule": (["heldout", None, True], "one of 'batch', 'held-out'"),
    "cg_worth": ([None, "yes", 1], "True or False"),
    "cg_noise": ([-0.1, 1.0, NAN, "0.3", True], "a number at least 0 and below 1, or None"),
    "cg_survival": ([0.0, 1.0, NAN, "0.05", True], "a number greater than 0 and below 1, or None"),
    "averaging": ([-0.1, 1.0, NAN, None, "always"], "a number at least 0 and below 1, or 'auto'"),
    "noise_every": ([0, -1], "at least 1 or None"),
    "damping_rise": ([0, 0.5, NAN, INF, None, True], "a number at least 1"),
    "damping_factor": ([0, -0.5, 1.01, NAN, None], "a number greater than 0 and at most 1"),
    "damping_min": ([0, -1.0, NAN, INF, "1", None, True], "a number greater than 0"),
    "damping_max": ([0, -1.0, NAN, INF, "1", None, True], "a number greater than 0"),
    "structural_damping": ([-0.1, NAN, INF, None], "a number at least 0"),
    "cg_iterations": ([0, -3], "at least 1"),
    "curvature_batch": ([0, -1], "at least 1 or None"),
    "curvature_rows": (["random", None, 3], "one of 'block', 'strided'"),
    "delta_momentum": (["nesterov", 0.9, None, True], "one of 'start', 'exact'"),
    "cg_decay": ([-0.1, 1.1, NAN, None, "0.5"], "a number at least 0 and at most 1"),
    "cg_decay_growth": ([0.99, -1, INF, NAN], "a number at least 1"),
    "cg_decay_max": ([-0.1, 1.1, NAN], "a number at least 0 and at most 1"),
    "update_decay": ([0, -0.5, 1.1, NAN], "a number greater than 0 and at most 1"),
    "preconditioner": (["fisher", "", 0, False], "one of 'empirical-fisher', 'jacobi', 'kronecker', None"),
    "preconditioner_exponent": ([-0.1, 1.1, NAN, None], "a number at least 0 and at most 1"),
    "preconditioner_squares": (["no", None, True], "one of 'auto', 'exact', 'sampled'"),
    "factor_average": ([-0.1, 1.1, NAN, None], "a number at least 0 and at most 1"),
    "factor_every": ([0, -1], "at least 1 or None"),
    "backtracking": (["best", "last", 1, True], "one of 'all', 'first-worse', None"),
    "line_search_steps": ([-1], "at least 0"),
    "max_norm": ([0, -2.0, NAN, INF, "fan-out", True], "a number greater than 0, 'fan-in', or None"),
    "nonfinite": (["ignore", None, True], "one of 'raise', 'skip'"),
    "max_rejections": ([0, -1], "at least 1 or None"),
    "microbatch": ([0, -1], "at least 1 or None"),
    "momentum_off_on_divergence": ([None, "yes", 1], "True or False"),
    "decay_direction": ([None, "yes", 1], "True or False"),
    "split_vectors": ([None, "yes", 1], "True or False"),
    "message_dtype": (["float16", torch.bfloat16, 16], "one of None, 'bfloat16'"),
    "check_every": ([0, -1], "at least 1"),
    "rank_timeout": ([0, -1.0, NAN, INF, "10", True], "a number greater than 0 and at most 1e+09, or None"),
}
NOT_WHOLE = {
    "cg_iterations": ([2.0, 2.5, "3", None, True], "a whole number"),
    "curvature_batch": ([10.0, "all", True], "a whole number or None"),
    "factor_every": ([5.0, "auto"], "a whole number or None"),
    "noise_every": ([5.0, "auto"], "a whole number or None"),
    "line_search_steps": ([60.0, None, False], "a whole number"),
    "max_rejections": ([8.0, "8", True], "a whole number or None"),
    "microbatch": ([8.0, "8"], "a whole number or None"),
    "check_every": ([10.0, None, True], "a whole number"),
}
OWN_OF_HF = {
    "progress_tolerance": ([-1e-9, NAN, None], "a number at least 0"),
    "iterate_spacing": ([1.0, 0.5, INF, None], "a number greater than 1"),
}
NOT_OF_HF = {
    *("damping_rule", "cg_worth", "cg_noise", "cg_survival", "curvature_batch", "curvature_rows"),
    *("noise_every", "factor_average", "factor_every", "target_ratio", "decay_direction"),
}
"""A second batch and its noise have no place where one step sees all of the data."""
OF_THE_OPTIMIZER = {
    "weight_decay": ([-1e-9, NAN, INF, None, "0", True], "a number at least 0"),
    "seed": ([1.5, "1", True], "a whole number or None"),
}


def each(*tables):
    return [
        pytest.param(name, value, expected, id=f"{name}={value!r}")
        for table in tables
        for name, (values, expected) in table.items()
        for value in values
    ]


def message(owner, name, value, expected):
    return f"{owner}({name}={value!r}): must be {expected}"


def test_every_setting_is_in_the_table():
    assert set(OUT_OF_RANGE) == set(shf.Config.names())
    assert set(OUT_OF_RANGE) - NOT_OF_HF | set(OWN_OF_HF) == set(shf.HFConfig.names())


@pytest.mark.parametrize(("name", "value", "expected"), each(OUT_OF_RANGE, NOT_WHOLE, OF_THE_OPTIMIZER))
def test_shf_refuses_what_is_out_of_range(name, value, expected):
    with pytest.raises(ValueError, match="must be") as error:
        shf.SHF(mlp(), nn.CrossEntropyLoss(), **{name: value})
    assert str(error.value) == message("SHF", name, value, expected)


@pytest.mark.parametrize(("name", "value", "expected"), each(OUT_OF_RANGE, NOT_WHOLE, OWN_OF_HF, OF_THE_OPTIMIZER))
def test_hf_refuses_what_is_out_of_range(name, value, expected):
    if name in NOT_OF_HF:
        pytest.skip("HF has no such option")
    if name == "preconditioner":
        expected = expected.replace("'kronecker', ", "")
    if name == "solver":
        expected = "one of 'cg'"
    with pytest.raises(ValueError, match="must be") as error:
        shf.HF(mlp(), nn.CrossEntropyLoss(), **{name: value})
    assert str(error.value) == message("HF", name, value, expected)


@pytest.mark.parametrize(("name", "value", "expected"), each(OUT_OF_RANGE, NOT_WHOLE))
def test_config_refuses_the_same_by_itself(name, value, expected):
    with pytest.raises(ValueError, match="must be") as error:
        shf.Config(**{name: value})
    assert str(error.value) == message("SHF", name, value, expected)


@pytest.mark.parametrize(("name", "value", "expected"), each({"weight_decay": OF_THE_OPTIMIZER["weight_decay"]}))
def test_parameter_groups_are_checked_too(name, value, expected):
    model = mlp()
    with pytest.raises(ValueError, match="parameter group") as error:
        shf.SHF(model, nn.CrossEntropyLoss(), [{"params": model.parameters(), name: value}])
    assert str(error.value) == message("SHF: parameter group", name, value, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("damping", 1e-15),
        ("damping_factor", 1),
        ("damping_min", 1.0),
        ("damping_max", 1),
        ("structural_damping", 0),
        ("cg_iterations", 1),
        ("curvature_batch", 1),
        ("cg_decay", 0),
        ("cg_decay", 1),
        ("cg_decay_growth", 1),
        ("cg_decay_max", 0.0),
        ("update_decay", 1),
        ("preconditioner", "jacobi"),
        ("preconditioner_exponent", 0),
        ("preconditioner_exponent", 1),
        ("backtracking", None),
        ("line_search_steps", 0),
        ("max_norm", 1e-3),
        ("max_norm", "fan-in"),
        ("nonfinite", "skip"),
        ("max_rejections", 1),
        ("max_rejections", None),
        ("microbatch", 1),
        ("weight_decay", 0),
        ("seed", 0),
        ("seed", -1),
        ("seed", 2**70),
    ],
)
def test_the_ends_of_the_ranges_work(name, value):
    info = shf.SHF(mlp(), nn.CrossEntropyLoss(), **{name: value}).step(*labelled())
    assert info.loss_after <= info.loss_before


@pytest.mark.parametrize("options", [{"damping": 2.0, "damping_max": 1.5}, {"damping_min": 3.0}])
def test_damping_begins_between_its_bounds(options):
    """Fails without the check: λ = 2 with a ceiling of 1.5 would be used as it is in the first step."""
    with pytest.raises(ValueError, match=r"SHF\(damping=.*\): must be between damping_min=.* and damping_max="):
        shf.SHF(mlp(), nn.CrossEntropyLoss(), **options)


@pytest.mark.parametrize(
    "options",
    [{"damping_factor": 0.1, "damping_rise": 400.0}, {"damping_factor": 1e-100, "damping_rule": "held-out"}],
)
def test_a_damping_that_leaps_beyond_all_numbers_is_refused(options):
    with pytest.raises(ValueError, match=r"by its power (400|4) in one step .* more than 1e15"):
        shf.SHF(mlp(), nn.CrossEntropyLoss(), **options)


def test_hf_refuses_a_preconditioner_of_a_single_batch():
    """Fails without the check: the factors would be those of the last batch alone."""
    with pytest.raises(ValueError, match=r"HF\(preconditioner=Kronecker\(.*\)\): it is made of a single batch"):
        shf.HF(mlp(), nn.CrossEntropyLoss(), preconditioner=shf.preconditioners.Kronecker())


@pytest.mark.parametrize("damping", [2.0, "auto"])
def test_the_ceiling_is_above_the_floor(damping):
    with pytest.raises(ValueError, match=r"SHF\(damping_max=1\): must be a number at least 10"):
        shf.SHF(mlp(), nn.CrossEntropyLoss(), damping=damping, damping_min=10, damping_max=1)


@pytest.mark.parametrize("kind", [shf.SHF, shf.HF])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("lr", "there is no learning rate in this optimizer"),
        ("momentum", "there is no learning rate in this optimizer"),
        ("betas", "there is no learning rate in this optimizer"),
        ("weightdecay", "did you mean 'weight_decay'? options are"),
        ("dampening", "did you mean 'damping"),
        ("amsgrad", "options are: weight_decay, "),
    ],
)
def test_unknown_options_are_named_and_close_ones_come_first(kind, name, advice):
    with pytest.raises(TypeError) as error:
        kind(mlp(), nn.CrossEntropyLoss(), **{name: 0.1})
    said = str(error.value)
    assert said.startswith(f"{kind.__name__}() has no option '{name}': {advice}")
    options = said.partition("options are: ")[2].split(", ")
    assert options == [*named_arguments(kind), *kind._config_type.names()]


def named_arguments(kind):
    """What it takes by name alone, besides options."""
    return [p.name for p in inspect.signature(kind.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]


def test_type_checkers_and_the_page_see_every_option():
    """The files that tools/options.py makes from the fields are those that are there."""
    assert set(get_type_hints(Options)) == {*shf.Config.names(), *shf.HFConfig.names()}
    assert not Options.__required_keys__
    for kind in (shf.SHF, shf.HF):
        assert inspect.signature(kind).parameters["options"].annotation == Unpack[Options]
    tool = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "options.py"))
    assert tool["TYPES"].samefile(options_file.__file__)
    assert tool["TYPES"].read_text(encoding="utf-8") == tool["source"]()
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"]()


def test_every_option_is_declared_once_and_says_what_it_is():
    for config in (shf.Config, shf.HFConfig):
        owners = [name for role in config.roles.values() for name in role.flat()]
        assert len(owners) == len(set(owners))
        assert all(text.endswith(".") for _, _, text in config.flat().values())
        assert all(f"{name}: {text}" in config.__doc__ for name, (_, _, text) in config.flat().items())


def test_options_are_keyword_only():
    model = mlp()
    with pytest.raises(TypeError, match="positional"):
        shf.SHF(model, nn.CrossEntropyLoss(), model.parameters(), 1.0)


def test_defaults_are_those_of_the_paper():
    assert shf.Config.defaults() == {
        "solver": "cg",
        "target_ratio": 0.1,
        "damping": 1.0,
        "damping_factor": 0.99,
        "damping_rise": 1.0,
        "damping_min": 1e-15,
        "damping_max": 1e15,
        "structural_damping": 0.0,
        "damping_rule": "batch",
        "cg_iterations": 3,
        "cg_worth": False,
        "cg_noise": None,
        "cg_survival": None,
        "curvature_batch": None,
        "curvature_rows": "block",
        "delta_momentum": "start",
        "cg_decay": 0.5,
        "cg_decay_growth": 1.01,
        "cg_decay_max": 0.99,
        "update_decay": 1.0,
        "preconditioner": "empirical-fisher",
        "preconditioner_exponent": 0.75,
        "preconditioner_squares": "auto",
        "factor_average": 0.95,
        "factor_every": None,
        "backtracking": "all",
        "line_search_steps": 60,
        "max_norm": None,
        "nonfinite": "raise",
        "max_rejections": 50,
        "averaging": 0.0,
        "noise_every": None,
        "microbatch": None,
        "momentum_off_on_divergence": False,
        "decay_direction": False,
        "split_vectors": False,
        "message_dtype": None,
        "check_every": 100,
        "rank_timeout": None,
    }


def test_defaults_of_hf_are_those_of_martens():
    config = shf.HFConfig()
    assert (config.damping_factor, config.cg_iterations, config.cg_decay) == (2 / 3, 250, 0.95)
    assert (config.progress_tolerance, config.iterate_spacing) == (5e-4, 1.3)


def test_settings_are_frozen():
    config = shf.SHF(mlp(), nn.CrossEntropyLoss()).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.damping = 2.0


# --- presets ------------------------------------------------------------------------------------------------------------

PRESETS = {
    "classifier": {"damping": 1.0, "cg_iterations": 3, "curvature_batch": 100, "weight_decay": 5e-4},
    "dropout_classifier": {
        "damping": 1.0,
        "cg_iterations": 3,
        "curvature_batch": 100,
        "weight_decay": 2e-5,
        "update_decay": 0.998,
    },
    "autoencoder": {
        "damping": 10.0,
        "cg_iterations": 25,
        "weight_decay": 0.0,
        "momentum_off_on_divergence": True,
    },
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hold_the_settings_of_the_paper(name):
    assert dict(getattr(shf.presets, name)) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_work_unpacked(name):
    model = mlp(dropout=0.5 if name == "dropout_classifier" else 0.0)
    loss = shf.losses.per_case(nn.BCEWithLogitsLoss()) if name == "autoencoder" else nn.CrossEntropyLoss()
    inputs, targets = (valued if name == "autoencoder" else labelled)(150)
    if name == "autoencoder":
        targets = targets.sigmoid()
    optimizer = shf.SHF(model, loss, **getattr(shf.presets, name))
    info = optimizer.step(inputs, targets)
    assert info.accepted
    assert info.damping == PRESETS[name]["damping"]
    assert optimizer.param_groups[0]["weight_decay"] == PRESETS[name]["weight_decay"]


def test_the_fast_preset_works_unpacked_and_on_any_scale():
    """Nothing in it belongs to the scale of the loss: f and 100 f are trained alike."""
    ends = []
    for scale in (1.0, 100.0):
        torch.manual_seed(0)
        model = mlp(dropout=0.2)
        loss = nn.CrossEntropyLoss()
        optimizer = shf.SHF(model, _Scaled(loss, scale), seed=1, **shf.presets.fast)
        infos = [optimizer.step(*labelled(60, seed=k)) for k in range(6)]
        assert infos[-1].loss_before < infos[0].loss_before
        with optimizer.averaged():
            ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert (ends[0] - ends[1]).abs().max() < 1e-6


class _Scaled(nn.Module):
    def __init__(self, loss, scale):
        super().__init__()
        self.loss, self.scale = loss, scale

    def forward(self, outputs, targets):
        return self.scale * self.loss(outputs, targets)


@pytest.mark.parametrize("name", [*PRESETS, "fast"])
def test_presets_cannot_be_changed(name):
    with pytest.raises(TypeError, match="does not support item assignment"):
        getattr(shf.presets, name)["damping"] = 2.0


def test_presets_may_be_overridden():
    optimizer = shf.SHF(mlp(), nn.CrossEntropyLoss(), **{**shf.presets.classifier, "damping": 7.0})
    assert optimizer.damping == 7.0


@pytest.mark.parametrize("kind", [shf.SHF, shf.HF])
def test_the_model_must_be_a_module(kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(model=.*\): expected a torch.nn.Module"):
        kind(torch.relu, nn.CrossEntropyLoss())


@pytest.mark.parametrize(("take", "type_"), [(iter, "generator"), (list, "list")])
def test_parameters_in_the_models_place_are_named_not_printed(take, type_):
    with pytest.raises(TypeError, match=rf"^SHF\(model=<{type_}>\): expected .* its parameters, .*no learning rate"):
        shf.SHF(take(mlp().parameters()), nn.CrossEntropyLoss())


def test_numbers_of_numpy_are_numbers():
    config = shf.SHF(
        mlp(), nn.CrossEntropyLoss(), cg_iterations=np.int64(4), damping=np.float32(0.5), seed=np.int64(7)
    ).config
    assert (config.cg_iterations, config.damping) == (4, 0.5)
