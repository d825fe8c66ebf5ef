"""Optimizers that go wrong on one stage, named in settings as ``tests.distributed.failing.CLASS``."""

import os
import time

import torch


class OnHead(torch.optim.SGD):
    """SGD that does something else at its third step, on the stage that holds the head."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        names = [name for group in self.param_groups for name in group["param_names"]]
        if "head.weight" in names and self.num_steps == 3:
            self.go_wrong()
        super().step(closure)

    def go_wrong(self):
        raise NotImplementedError


class Raises(OnHead):
    def go_wrong(self):
        raise ZeroDivisionError("no third step for me")


class Exits(OnHead):
    def go_wrong(self):
        os._exit(7)


class Sleeps(OnHead):
    def go_wrong(self):
        time.sleep(60)
