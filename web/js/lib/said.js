// The server's words are English. Those of its sentences that hold no names or numbers, in the page's other language.
import { isEnglish } from "./words.js";

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

/** Such a sentence in the page's language; null where the page is English or the sentence is not known. */
export function said(text) {
  return isEnglish() ? null : (ZH[text?.replace(/^eager: /, "")] ?? null);
}
