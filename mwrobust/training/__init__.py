"""Training against many threats.

A training method is a policy, which picks the threat of each mini batch, and an
adversary, which makes the images that the mini batch is trained on:

  policies     multiplicative weights and its rivals
  adversaries  one threat, the worst or all of them, or one climb in all balls
  game         the regret and duality gap of the paper's game
"""
