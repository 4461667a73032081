"""Distributed DQN: a learner and collectors, each in a process of its own."""
