import math
import sys
import textwrap

import pytest
import torch
from torch import nn

from slipstream.config import ModelConfig, OptimConfig
from slipstream.errors import ConfigError
from slipstream.models.llama import whole_model
from slipstream.models.roles import role
from slipstream.optim import Muon, build_optimizers, check_optim, find_rule
from slipstream.optim.build import MATRIX_ROLES

MODEL = ModelConfig(num_layers=2, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=24, vocab_size=11)
DOTTED = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shapes():
    return {name: param.shape for name, param in whole_model(MODEL).named_parameters()}


def parameters(shapes, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}


def names_of(optimizer):
    return [name for group in optimizer.param_groups for name in group["param_names"]]


def test_adamw_takes_all_and_spares_vectors_the_decay(shapes):
    params = parameters(shapes)
    built = build_optimizers(params, OptimConfig(lr=0.01, weight_decay=0.3), role=role)
    assert list(built) == ["adamw"]
    optimizer = built["adamw"]
    assert type(optimizer) is torch.optim.AdamW
    assert sorted(names_of(optimizer)) == sorted(params)
    for group in optimizer.param_groups:
        assert group["betas"] == (0.9, 0.95)
        assert group["lr"] == group["initial_lr"] == 0.01
        for name, param in zip(group["param_names"], group["params"], strict=True):
            assert param is params[name]
            assert group["weight_decay"] == (0.3 if param.ndim == 2 else 0.0)


def test_muon_takes_the_matrices_of_blocks_by_role(shapes):
    params = parameters(shapes)
    cfg = OptimConfig(
        name="muon",
        lr=0.02,
        weight_decay=0.3,
        args={"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
        adamw_lr=0.001,
        adamw_args={"betas": [0.8, 0.9]},
    )
    built = build_optimizers(params, cfg, role=role)
    assert list(built) == ["muon", "adamw"]
    assert type(built["muon"]) is Muon
    assert type(built["adamw"]) is torch.optim.AdamW
    assert all(role(name) in MATRIX_ROLES for name in names_of(built["muon"]))
    left = {name for name in params if role(name) in ("embedding", "head", "norm")}
    assert set(names_of(built["adamw"])) == left
    assert {"embed.weight", "head.weight"} <= left
    assert sorted(names_of(built["muon"]) + names_of(built["adamw"])) == sorted(params)
    (group,) = built["muon"].param_groups
    expected = {"lr": 0.02, "initial_lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": True}
    assert group.items() >= (expected | {"adjust_lr_fn": "match_rms_adamw"}).items()
    for group in built["adamw"].param_groups:
        assert group["initial_lr"] == 0.001
        assert group["betas"] == (0.8, 0.9)
        assert group["weight_decay"] == (0.3 if "embed.weight" in group["param_names"] else 0.0)


def test_muon_defaults_and_an_adamw_rate_of_zero(shapes):
    built = build_optimizers(parameters(shapes), OptimConfig(name="muon", lr=0.02), role=role)
    assert built["muon"].defaults.items() >= {"momentum": 0.95, "nesterov": True, "ns_steps": 5}.items()
    assert built["adamw"].param_groups[0]["initial_lr"] == 0.02
    built = build_optimizers(parameters(shapes), OptimConfig(name="muon", lr=0.02, adamw_lr=0.0), role=role)
    assert built["adamw"].param_groups[0]["lr"] == 0.0


def test_a_stage_without_matrices_and_one_without_vectors(shapes):
    params = parameters(shapes)
    muon = OptimConfig(name="muon")
    embedding = build_optimizers({"embed.weight": params["embed.weight"]}, muon, role=role)
    assert list(embedding) == ["adamw"]
    tail = {name: params[name] for name in ("head.norm.weight", "head.weight")}
    assert list(build_optimizers(tail, muon, role=role)) == ["adamw"]
    query = "blocks.0.attention.q.weight"
    assert list(build_optimizers({query: params[query]}, muon, role=role)) == ["muon"]
    assert build_optimizers({}, muon, role=role) == {}


def test_packed_experts_go_to_muon_and_biases_and_routers_do_not():
    params = {
        "e": nn.Parameter(torch.ones(3, 4, 4)),
        "r": nn.Parameter(torch.ones(3, 4)),
        "b": nn.Parameter(torch.ones(4)),
    }
    built = build_optimizers(
        params, OptimConfig(name="muon"), role={"e": "expert", "r": "router", "b": "q"}.__getitem__
    )
    assert names_of(built["muon"]) == ["e"]
    assert sorted(names_of(built["adamw"])) == ["b", "r"]


@pytest.mark.parametrize("name", [f"torch.optim.{each}" for each in (*DOTTED, "SGD")])
def test_any_dotted_rule(name, shapes):
    cfg = OptimConfig(name=name, lr=0.01, weight_decay=0.1 if name != "torch.optim.Rprop" else 0.0)
    assert check_optim(cfg) == []
    params = parameters(shapes)
    before = {each: param.detach().clone() for each, param in params.items()}
    (optimizer,) = build_optimizers(params, cfg, role=role).values()
    assert type(optimizer).__name__ == name.rpartition(".")[2]
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert all(torch.isfinite(param).all() for param in params.values())
    assert any(not torch.equal(param, before[each]) for each, param in params.items())


@pytest.mark.parametrize("name", ["adamw", "muon", *(f"torch.optim.{each}" for each in (*DOTTED, "SGD"))])
def test_updates_do_not_depend_on_how_parameters_are_grouped(name, shapes):
    """Pipeline stages hold parts of the model: the parts must step to the same bits as the whole."""
    cfg = OptimConfig(name=name, lr=0.01, weight_decay=0.1, args={"momentum": 0.9} if name.endswith(".SGD") else {})
    whole = parameters(shapes)
    ordered = list(whole)
    cuts = [ordered[:1], ordered[1:4], ordered[4:13], ordered[13:]]
    split = parameters(shapes)
    together = build_optimizers(whole, cfg, role=role)
    apart = [build_optimizers({each: split[each] for each in cut}, cfg, role=role) for cut in cuts]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for each in ordered:
            whole[each].grad = torch.randn(whole[each].shape, generator=generator)
            split[each].grad = whole[each].grad.clone()
        for built in (together, *apart):
            for optimizer in built.values():
                optimizer.step()
    assert all(torch.equal(whole[each], split[each]) for each in ordered)


def test_no_multi_tensor_path_on_a_cpu_unless_asked_for(shapes):
    for group in build_optimizers(parameters(shapes), OptimConfig(), role=role)["adamw"].param_groups:
        assert group["foreach"] is False
    asked = OptimConfig(args={"foreach": True})
    assert build_optimizers(parameters(shapes), asked, role=role)["adamw"].param_groups[0]["foreach"] is True
    fused = OptimConfig(args={"fused": True})
    assert build_optimizers(parameters(shapes), fused, role=role)["adamw"].param_groups[0]["fused"] is True


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "adamww"}, r"no optimizer 'adamww'\. Did you mean 'adamw'\?.*Allowed: adamw, muon"),
        ({"name": "SGD"}, r"Did you mean 'sgd'"),
        ({"name": "RMSprob"}, r"Did you mean 'torch\.optim\.RMSprop'"),
        ({"name": "nadm"}, r"Did you mean 'torch\.optim\.NAdam'"),
        ({"name": ""}, "no optimizer ''"),
        ({"name": "torch.optim.SDG"}, r"'torch\.optim' has no 'SDG'\. Did you mean 'torch\.optim\.SGD'"),
        ({"name": "torch.optimm.SGD"}, r"cannot import 'torch\.optimm'.*Did you mean 'torch\.optim\.SGD'"),
        ({"name": "no_such_package.Rule"}, r"cannot import 'no_such_package'.*PYTHONPATH"),
        ({"name": "torch.nn.Linear"}, "'torch.nn.Linear' is no optimizer class"),
        ({"name": "torch.optim.Optimizer"}, "is no optimizer class"),
        ({"name": "torch.optim.lr_scheduler"}, "is no optimizer class"),
        ({"name": "torch.optim.LBFGS"}, "cannot step without closure"),
        ({"name": "torch.optim.SparseAdam"}, "sparse gradients only"),
        ({"name": "torch.optim.Muon"}, r"2D parameters.*optim\.name 'muon'"),
        ({"args": {"beta": 1}}, r"'adamw' has no argument 'beta'\. Did you mean 'betas'\? Allowed: amsgrad, betas,"),
        ({"args": {"params": []}}, "no argument 'params'"),
        ({"args": {"lr": 1.0}}, r"'lr' has a setting of its own; set optim\.lr"),
        ({"args": {"weight_decay": 1.0}}, r"set optim\.weight_decay"),
        ({"args": {"betas": [0.9, 1.5]}}, r"Invalid beta parameter.*optim\.args"),
        ({"args": {"betas": "high"}}, r"refuses its arguments.*optim\.args"),
        ({"args": {"capturable": True}}, "fails in a trial step"),
        ({"name": "muon", "args": {"momentun": 0.9}}, "'muon' has no argument 'momentun'. Did you mean 'momentum'"),
        ({"name": "muon", "args": {"adjust_lr_fn": "rms"}}, "adjust_lr_fn must be one of.*given 'rms'"),
        ({"name": "muon", "args": {"ns_coefficients": 3}}, r"refuses its arguments"),
        ({"name": "muon", "adamw_args": {"momentum": 0.9}}, r"optim\.adamw_args: 'adamw' has no argument 'momentum'"),
        ({"name": "muon", "adamw_args": {"lr": 0.9}}, r"set optim\.adamw_lr"),
        ({"name": "muon", "adamw_args": {"eps": -1.0}}, r"Invalid epsilon.*optim\.adamw_args"),
        ({"lr": -1.0}, r"optim\.lr must be a finite number of at least 0, given -1"),
        ({"lr": math.nan}, r"optim\.lr must be a finite number"),
        ({"name": "muon", "adamw_lr": math.inf}, r"optim\.adamw_lr must be"),
        ({"weight_decay": -0.1}, r"optim\.weight_decay must be"),
        ({"max_grad_norm": -0.1}, r"optim\.max_grad_norm must be"),
        ({"lr_warmup_steps": 11, "lr_total_steps": 10}, "lr_warmup_steps 11 is longer than the schedule's 10"),
        ({"lr_warmup_steps": 51}, "lr_warmup_steps 51 is longer than the schedule's 50"),
        ({"lr_total_steps": 0}, "at least 1 update"),
        ({"lr_final_fraction": 2.0}, "from 0 to 1, given 2.0"),
    ],
)
def test_bad_settings_are_refused_with_a_remedy(settings, says):
    with pytest.raises(ConfigError, match=says):
        check_optim(OptimConfig(**settings), num_steps=50)


def test_warm_up_without_a_known_total_is_not_judged():
    assert check_optim(OptimConfig(lr_warmup_steps=1000)) == []
    assert check_optim(OptimConfig(lr_warmup_steps=50), num_steps=50) == []


def test_settings_without_effect_are_warned_of():
    assert check_optim(OptimConfig(name="muon", adamw_lr=0.1, adamw_args={"eps": 1e-6})) == []
    warnings = check_optim(OptimConfig(adamw_lr=0.1, adamw_args={"eps": 1e-6}))
    assert [warning.split()[0] for warning in warnings] == ["optim.adamw_lr", "optim.adamw_args"]
    (warning,) = check_optim(OptimConfig(name="torch.optim.Rprop", weight_decay=0.1))
    assert "weight_decay 0.1 has no effect" in warning


def test_rules_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "my_own_rules.py").write_text(
        textwrap.dedent(
            """
            import torch

            class Sign(torch.optim.Optimizer):
                def __init__(self, params, lr, **others):
                    super().__init__(params, {"lr": lr, **others})

                @torch.no_grad()
                def step(self, closure=None):
                    for group in self.param_groups:
                        for param in group["params"]:
                            param.sub_(param.grad.sign(), alpha=group["lr"])

            class Sharp(Sign):
                def step(self, closure=None):
                    if closure is None:
                        raise KeyError("closure, please")

            """
        )
    )
    (tmp_path / "my_broken_rules.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("my_own_rules", "my_broken_rules"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert check_optim(OptimConfig(name="my_own_rules.Sign", args={"anything": 1})) == []
    assert find_rule("my_own_rules.Sign").__name__ == "Sign"
    with pytest.raises(ConfigError, match=r"fails in a trial step.*closure, please"):
        check_optim(OptimConfig(name="my_own_rules.Sharp"))
    with pytest.raises(ConfigError, match=r"has no 'Sing'. Did you mean 'my_own_rules.Sign'"):
        check_optim(OptimConfig(name="my_own_rules.Sing"))
    with pytest.raises(ConfigError, match=r"is no optimizer class"):
        check_optim(OptimConfig(name="my_own_rules.torch"))
    with pytest.raises(ConfigError, match=r"cannot import 'my_broken_rules'.*ZeroDivisionError"):
        check_optim(OptimConfig(name="my_broken_rules.Rule"))


def test_a_rate_that_never_falls_has_no_end():
    (warning,) = check_optim(OptimConfig(lr_schedule="constant", lr_final_fraction=0.3))
    assert warning.startswith("optim.lr_final_fraction has no effect with optim.lr_schedule 'constant'")
    assert not check_optim(OptimConfig(lr_schedule="linear", lr_final_fraction=0.3))
