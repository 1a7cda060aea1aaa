"""The engine behind HTTP: the routes of SGLang that a trainer needs, and those of OpenAI."""
