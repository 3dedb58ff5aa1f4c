// Work that is asked for more often than it should be done.

/** A function that does `work` soon after it is called: at most once in `ms`, and always after the last call. */
export function paced(work, ms) {
  let [timer, last] = [null, -Infinity];
  const now = () => {
    [timer, last] = [null, Date.now()];
    work();
  };
  return () => {
    timer ??= setTimeout(now, Math.max(0, last + ms - Date.now()));
  };
}
