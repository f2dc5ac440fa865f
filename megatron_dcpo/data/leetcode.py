"""The environment that solutions of LeetCode problems expect."""

# What LeetCode's own environment gives: names that solutions use without importing them, and linked
# nodes.
LEETCODE_SETUP = """\
import bisect, collections, datetime, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from string import *
from typing import *

inf = float("inf")


class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next


class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right


def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head


def tree_node(values):
    if not values:
        return None
    nodes = [None if value is None else TreeNode(value) for value in values]
    parents, waiting = iter([node for node in nodes if node is not None]), iter(nodes[1:])
    for parent in parents:
        parent.left = next(waiting, None)
        parent.right = next(waiting, None)
    return nodes[0]


def is_same_list(p, q):
    while p is not None and q is not None:
        if p.val != q.val:
            return False
        p, q = p.next, q.next
    return p is None and q is None


def is_same_tree(p, q):
    waiting = [(p, q)]
    while waiting:
        p, q = waiting.pop()
        if p is None or q is None:
            if p is not q:
                return False
        elif p.val != q.val:
            return False
        else:
            waiting += [(p.left, q.left), (p.right, q.right)]
    return True
"""  # noqa: E501 -- the key of the tests is a hash of this text
