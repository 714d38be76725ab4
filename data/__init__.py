"""From raw chat logs to what the trainer reads, one module per step.

1. ``generate_data``: conversations whose answers the target itself wrote (``plans``, ``converse``, ``backends``).
2. ``conversations``: rows of any shape to OpenAI messages; ``chat_template``: those to token ids with a loss mask;
   ``windows``: long chats to overlapping windows behind their system prompt.
3. ``sequence_packing``: all of that for a file, and the windows packed into blocks.
4. ``extract_features``: what the drafter learns from, read off the frozen target once.
5. ``vocabulary``: the tokens that the drafter can propose; ``collator``: blocks to training rows, with COD sampling.

``prompts`` reads what ``evaluate_peagle.py`` asks; ``hub`` publishes the output of a step.
"""
