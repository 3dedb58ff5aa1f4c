// What views of the tab have in common: they follow what happens only while they are seen.

/** A view's `show` and `hide`. While it is shown, what `follow` begins goes on, until what that returned is called. */
export function whileSeen(follow, draw) {
  let end = null;
  const show = () => {
    end ??= follow();
    draw();
  };
  const hide = () => {
    end?.();
    end = null;
  };
  return { show, hide };
}

/** Calls `work` every so many milliseconds; returns how to stop it. */
export function every(ms, work) {
  const timer = setInterval(work, ms);
  return () => clearInterval(timer);
}
