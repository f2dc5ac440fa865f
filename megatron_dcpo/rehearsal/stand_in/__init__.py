"""Packages that stand for what needs a GPU. This folder on ``sys.path`` makes ``import
transformer_engine`` find one.
"""
