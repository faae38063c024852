"""Reads one YAML document from the standard input and prints it as JSON. Fails if the text is not YAML, or repeats a key."""

import json
import sys

import yaml


class Loader(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is repeated: {keys}"
        return super().construct_mapping(node, deep)


json.dump(yaml.load(sys.stdin, Loader), sys.stdout)
