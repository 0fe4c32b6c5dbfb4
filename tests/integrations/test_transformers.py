"""Tiny models made from configurations: no file is fetched."""

import re
import warnings
from pathlib import Path

import pytest
import torch

import shf
from helpers import theta

USING = Path(__file__).parents[2] / "docs" / "using.md"


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tokens():
    torch.manual_seed(0)
    ids = torch.randint(40, (32, 12))
    ids[:, 1::2] = ids[:, ::2]  # something to learn
    return ids


def gpt2(seed=0):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **config))


def trainer(model, directory, rows, kind=None, epochs=3, **settings):
    from transformers import TrainingArguments

    from shf.integrations.transformers import SHFTrainer

    fixed = {"per_device_train_batch_size": 16, "logging_steps": 1, "report_to": [], "use_cpu": True, "seed": 0}
    arguments = {name: settings.pop(name) for name in list(settings) if name in TrainingArguments.__annotations__}
    args = TrainingArguments(directory, num_train_epochs=epochs, disable_tqdm=True, **{**fixed, **arguments})
    return (kind or SHFTrainer)(model, args, train_dataset=rows, **settings)


def test_the_recipe_of_using_for_language_models():
    """As the page has it: inputs are keywords. The loss is the model's own, on tokens that are not shifted."""
    recipe = re.search(r"`forward=(lambda model, inputs: .*?)`", USING.read_text(encoding="utf-8"))[1]
    ids = tokens()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    forward = eval(recipe)  # noqa: S307 - a line of the page
    optimizer = shf.SHF(gpt2(), torch.nn.CrossEntropyLoss(), forward=forward, **shf.presets.fast)
    losses = [optimizer.step(batch, ids).loss_before for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]


def test_a_classifiers_logits_are_taken():
    ids = tokens()
    optimizer = shf.SHF(bert(), torch.nn.CrossEntropyLoss())
    assert optimizer.step({"input_ids": ids}, ids[:, 0] % 3).accepted


def test_a_language_model_is_trained_saved_and_resumed(tmp_path):
    """Evaluated at the average of its iterates; from a checkpoint it goes on as if it had not stopped."""
    rows = [{"input_ids": i, "labels": i} for i in tokens()]
    options = {**shf.presets.fast, "averaging": 0.9, "seed": 0}
    settings = {"eval_dataset": rows[:8], "eval_strategy": "epoch", "save_strategy": "epoch", "options": options}
    first = trainer(gpt2(), tmp_path, rows, **settings)
    first.train()
    assert first.state.global_step == 6
    logs = [entry for entry in first.state.log_history if "loss" in entry]
    assert len(logs) == 6
    assert all({"loss", "damping", "reduction_ratio"} <= set(entry) for entry in logs)
    assert not any("learning_rate" in entry or "grad_norm" in entry for entry in logs)
    assert logs[-1]["loss"] < logs[0]["loss"]
    optimizer = first.optimizer.optimizer
    assert optimizer.epoch_index == 3
    assert optimizer.param_groups[0]["shf"]["averaged"]  # after the last evaluation
    again = trainer(gpt2(seed=1), tmp_path, rows, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(theta(again.model), theta(first.model))


def test_the_loss_is_found_or_given(tmp_path):
    ids = tokens()
    rows = [{"input_ids": i, "labels": i[0] % 3} for i in ids]
    found = trainer(bert(), tmp_path / "found", rows, epochs=1, options={"seed": 0})
    found.train()
    assert found._own_loss.__name__ == "classes"
    given = trainer(
        bert(),
        tmp_path / "given",
        rows,
        epochs=1,
        options={"seed": 0},
        compute_loss_func=lambda outputs, labels, **_: torch.nn.functional.cross_entropy(outputs.logits, labels),
    )
    given.train()
    assert torch.allclose(theta(given.model), theta(found.model), atol=1e-5)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2.*must be 1"):
        trainer(bert(), tmp_path, rows, gradient_accumulation_steps=2)


def test_the_plain_trainer_is_answered_with_the_page(tmp_path):
    from transformers import Trainer

    model, rows = gpt2(), [{"input_ids": i, "labels": i} for i in tokens()]
    optimizer = shf.SHF(model, torch.nn.CrossEntropyLoss())
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), 0.1), lambda step: 1.0)
    plain = trainer(model, tmp_path, rows, kind=Trainer, optimizers=(optimizer, schedule))
    with pytest.raises(TypeError, match=r"docs/integrations\.md#(accelerate|transformers)"):
        plain.train()
