"""REINFORCE on a cart that is to stay near the middle: the world has a generator of its own, the baseline is a running average.

Based on the reinforcement learning example of pytorch/examples, rewritten and smaller.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import trainfold


class Cart:
    """A cart on a line that is pushed left or right; wind pushes it too."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.place, self.speed = self.random.uniform(-0.5, 0.5, size=2)
        return self.seen()

    def step(self, action):
        self.speed += (0.2 if action else -0.2) + 0.1 * self.random.standard_normal()
        self.place += 0.3 * self.speed
        return self.seen(), 1.0 - abs(self.place), abs(self.place) > 2.0

    def seen(self):
        return torch.tensor([self.place, self.speed], dtype=torch.float32)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, seen):
        return Categorical(logits=self.layers(seen))


parser = argparse.ArgumentParser()
parser.add_argument("--out", default="out")
parser.add_argument("--gamma", type=float, default=0.95)
parser.add_argument("--episodes", type=int, default=500)
args = parser.parse_args()
torch.manual_seed(543)
policy, cart = Policy(), Cart(543)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
running_reward = 0.0


def get_world():
    return {"random": cart.random.bit_generator.state, "running_reward": running_reward}


def set_world(saved):
    global running_reward
    cart.random.bit_generator.state = saved["random"]
    running_reward = saved["running_reward"]


live = trainfold.attach(policy, optimizer, extra={"world": (get_world, set_world)})
manager = trainfold.CheckpointManager(args.out, every=100)
manager.restore(live)
while live.progress.step < args.episodes and not manager.should_stop:
    seen, log_probs, rewards = cart.reset(), [], []
    for _ in range(15):
        chance = policy(seen)
        action = chance.sample()
        seen, reward, is_over = cart.step(action.item())
        log_probs.append(chance.log_prob(action))
        rewards.append(reward)
        if is_over:
            break
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + args.gamma * following
        returns.insert(0, following)
    advantages = torch.tensor(returns) - running_reward
    loss = -(torch.stack(log_probs) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running_reward += 0.05 * (sum(rewards) - running_reward)
    live.record(loss=loss, running_reward=running_reward, length=len(rewards))
    live.advance(samples=len(rewards))
    manager.step(live)
manager.close()
