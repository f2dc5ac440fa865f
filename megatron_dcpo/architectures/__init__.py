"""A model's ``config.json`` goes in, its :class:`Architecture` comes out."""
