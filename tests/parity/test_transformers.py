"""Our models and transformers' compute the same, both ways: logits and greedy text."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import ModelConfig, from_dict
from slipstream.data.tokenizer import ByteTokenizer
from slipstream.errors import CheckpointError, ConfigError
from slipstream.evaluation.generation import generate
from slipstream.models.huggingface import open_hub_model, write_hub_model
from slipstream.models.llama import whole_model
from slipstream.models.own import OwnParts
from slipstream.models.partition import cut
from slipstream.models.shapes import tied_names
from slipstream.train.export import check_logits, export_hub, logit_difference
from slipstream.train.launch import launch
from slipstream.train.own_hub import own_causal_lm
from slipstream.train.progress import SilentReporter
from slipstream.train.trained import open_trained

transformers = pytest.importorskip("transformers")

CLOSE = 1e-4
SIZES = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": 61}
OURS = {
    "llama": {},
    "llama, tied, wide heads": {"tie_embeddings": True, "head_dim": 12},
    "mistral": {"sliding_window": 7},
    "mistral, tied, wide heads, sees all": {"sliding_window": 60, "tie_embeddings": True, "head_dim": 12},
    "qwen3": {"qk_norm": True, "head_dim": 12},
    "qwen3, tied": {"qk_norm": True, "tie_embeddings": True},
    "mixtral": {"num_experts": 4},
    "qwen3-moe": {"num_experts": 4, "qk_norm": True, "expert_ffn_dim": 20, "num_dense_layers": 1},
    "qwen3-moe, not renormalized": {"num_experts": 4, "qk_norm": True, "router_renormalize": False},
    "qwen2-moe": {"num_experts": 4, "num_shared_experts": 1, "expert_ffn_dim": 20},
    "qwen2-moe, two shared, dense first, wide heads, tied": {
        "num_experts": 4,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "head_dim": 12,
        "router_renormalize": False,
        "tie_embeddings": True,
    },
}
THEIRS = {
    "llama": ("LlamaConfig", {}),
    "llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 5, "head_dim": 16}),
    "mistral without a window": ("MistralConfig", {"sliding_window": None}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "mlp_only_layers": [0]},
    ),
}


def ids(vocab_size, length=40):
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(theirs, ours, vocab_size):
    tokens = ids(vocab_size)
    logits = ours(tokens)
    assert logits.std() > 0.1, "the models must say something"
    return float((theirs.eval()(input_ids=tokens).logits - logits).abs().max())


@pytest.mark.parametrize("changes", OURS.values(), ids=OURS)
def test_what_we_write_transformers_computes(tmp_path, changes):
    cfg = ModelConfig(**{**SIZES, "init_std": 0.3, "rope_theta": 100.0, "norm_eps": 1e-3, **changes})
    ours = whole_model(cfg).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name:  # a norm of ones would hide a missing or misplaced one
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    weights = {name: tensor for name, tensor in ours.named_parameters() if name not in tied_names(cfg)}
    write_hub_model(tmp_path, cfg, weights, context_length=64, eos_id=60)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert difference(theirs, ours, cfg.vocab_size) < CLOSE


@pytest.mark.parametrize(("kind", "changes"), THEIRS.values(), ids=THEIRS)
def test_what_transformers_writes_we_compute(tmp_path, kind, changes):
    torch.manual_seed(0)
    config = getattr(transformers, kind)(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        rms_norm_eps=1e-3,
        **changes,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 300.0}
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    assert open_hub_model(tmp_path).cfg.rope_theta == 300.0
    trained = open_trained(tmp_path)
    assert difference(theirs, trained.module(), 61) < CLOSE
    assert logit_difference(tmp_path, trained) < CLOSE


TRAINED = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "mixtral": {"num_experts": 4},
    "qwen3-moe": {"num_experts": 4, "qk_norm": True},
    "qwen2-moe": {"num_experts": 4, "num_shared_experts": 1},
}


@pytest.fixture(scope="module", params=TRAINED)
def export(request, tmp_path_factory):
    """A model trained here, exported."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export")
    model = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64}
    tables = {
        "run_dir": str(folder / "run"),
        "data": {"sequence_length": 64},
        "model": model | TRAINED[request.param],
        "optim": {"lr": 0.01, "name": "muon", "adamw_lr": 0.01},
        "staleness": {"delay": 1, "error_feedback": 1.0},
        "train": {"num_steps": 40, "microbatch_size": 2},
        "evaluate": {"num_sequences": 4},
    }
    launch(from_dict(tables), reporter=SilentReporter())
    return folder / "run", export_hub(folder / "run", folder / "hub", weights="x")


def test_a_model_trained_here_is_the_same_in_transformers(export):
    _, report = export
    assert report.max_abs_logit_difference < CLOSE


def test_transformers_gives_the_same_ids(export):
    theirs = transformers.AutoTokenizer.from_pretrained(export[1].folder)
    for text in ("To be,\n\n  caf\u00e9 \u65e5\u672c\x00", "a<|endoftext|>b"):
        assert theirs(text)["input_ids"] == ByteTokenizer().encode(text)
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == ByteTokenizer().eos_id


def test_greedy_text_is_the_same(export):
    run, report = export
    tokenizer = transformers.AutoTokenizer.from_pretrained(report.folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(report.folder, dtype=torch.float32)
    prompt = "ROMEO:\nTo be"
    inputs = tokenizer(prompt, return_tensors="pt")
    written = theirs.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    for source in (run, report.folder):
        assert generate(open_trained(source), prompt, max_new_tokens=40).ids == written.tolist()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kind", "changes"), [THEIRS["llama"], THEIRS["qwen3"]], ids=["llama", "qwen3"])
def test_their_modules_on_the_pipeline_compute_what_they_compute_alone(tmp_path, kind, changes, tied):
    """Loss and gradients of the whole, cut into two stages, beside those of transformers' own forward."""
    torch.manual_seed(0)
    config = getattr(transformers, kind)(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        **changes,
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path)
    tokens = ids(61, length=12)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss = torch.nn.functional.cross_entropy(theirs(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    model = OwnParts(own_causal_lm(tmp_path), inputs, targets, seed=0)
    first, second = (model.build(spec, torch.device("cpu")) for spec in cut(model.costs(), 2))
    mine = model.loss_sum(second(first(inputs, dropout_key=(0, 0)), dropout_key=(0, 0)), targets) / targets.numel()
    mine.backward()
    assert mine.item() == pytest.approx(loss.item(), abs=1e-5)
    gradients = {name: each.grad for stage in (first, second) for name, each in stage.named_parameters()}
    for name, embedding in model.tied.items():
        gradients[embedding] = gradients[embedding] + gradients.pop(name)
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_experts": 4}, "MixtralForCausalLM has experts"), ({"sliding_window": 8}, "window of 8")],
)
def test_what_their_blocks_cannot_do_alone_is_refused(tmp_path, changes, words):
    cfg = ModelConfig(**SIZES, **changes)
    weights = dict(whole_model(cfg).requires_grad_(False).named_parameters())
    write_hub_model(tmp_path, cfg, weights, context_length=64, eos_id=60)
    with pytest.raises(ConfigError, match=words):
        own_causal_lm(tmp_path)


def test_logits_that_are_not_numbers_are_no_agreement(export, tmp_path):
    shutil.copytree(export[1].folder, tmp_path / "hub")
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the logits of .*hub are not numbers; nothing was written"):
        check_logits(tmp_path / "hub", open_trained(tmp_path / "hub"))
