"""What ``nemo_gym_agent.py`` uses of NeMo Gym 0.4."""
