// The server's words are English. Some of its sentences, in the page's other language.
import { locale } from "./words.js";

const ZH = {
  "its engine was deleted": "引擎已被删除",
  "The next run asks for the engine again.": "下次运行会再次请求该引擎。",
  "not built: the build was stopped": "未构建：构建已停止",
  "not run yet": "尚未运行",
  "Queue the workflow, or build the engine.": "请运行工作流，或构建引擎。",
  "settings changed, the next run asks for another engine": "设置已更改，下次运行会请求另一个引擎",
  "the model is being trained": "模型正在训练",
  "another node injects layers of its own into the model": "另一个节点向模型注入了自己的层",
  "weight hooks change the model between steps": "权重钩子在步骤之间更改模型",
  "TorchCompileModel compiles the same model; remove one of the two nodes":
    "TorchCompileModel 也在编译同一模型，请移除其中一个节点",
  "gradients are asked for, which engines do not give": "需要梯度，而引擎不提供梯度",
  "another node replaces the attention function": "另一个节点替换了注意力函数",
};

const RETIRED = /^the engine takes ([\d.]+) ms a (step|call) where your model without Slipstream takes ([\d.]+) ms, /;

/** Such a sentence in the page's language; null where the page is English or the sentence is not known. */
export function said(text) {
  const bare = text?.replace(/^eager: /, "");
  return !locale().startsWith("zh") || !bare ? null : (ZH[bare] ?? retired(bare));
}

function retired(text) {
  const [found, engine, by, eager] = text.match(RETIRED) ?? [];
  if (!found) return null;
  const each = by === "step" ? "每步" : "每次调用";
  const slower = `引擎${each} ${engine} 毫秒，不使用 Slipstream 的模型${each} ${eager} 毫秒，因此不使用此引擎`;
  return `${slower}；更新 Slipstream、ComfyUI、torch 或驱动后，或点击“构建引擎”时会重新尝试`;
}
