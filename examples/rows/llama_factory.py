"""LLaMA-Factory's Alpaca rows with earlier turns in history, for dcpo sft."""


def row(row):
    messages = []
    for question, answer in row.get("history") or []:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": row["output"]})
    return {"messages": messages, "system": row.get("system")}
