"""Training against many threats: who picks them, and what a batch becomes.

A method of training is a policy, which picks the threat of each mini batch, and
an adversary, which makes the images that the mini batch is trained on:

  policies     multiplicative weights and its rivals
  adversaries  one threat, the worst or all of them, or one climb in all balls
  game         the paper's game, observed: regret and duality gap
"""
