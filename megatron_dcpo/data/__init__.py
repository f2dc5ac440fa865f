"""From data files to prompts: loaders, prompt templates, the benchmark registry."""
